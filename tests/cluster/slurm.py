"""A SLURM cluster of one node on this machine: munged, slurmctld and slurmd of its own, all files in one folder."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Slurm:
    """A context manager; `environment` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                folder=self.folder,
                controller_port=free_port(),
                node_port=free_port(),
                cores=os.cpu_count(),
            )
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = {"key-file": key, "socket": "munge.socket", "log-file": "munge.log", "pid-file": "munge.pid"}
        files = [f"--{name}={self.folder / path}" for name, path in munge.items()]
        self._start("munged", "--foreground", "--force", *files, f"--seed-file={self.folder / 'munge.seed'}")
        self._wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        self._wait_for(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T", check=False), "an idle node")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, CANCELLED, FAILED ..."""
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)["JobState"]

    def wait(self, job: str, states: set[str], timeout_s: float) -> str:
        """Until the job is in one of `states`."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("slurm*.log"))

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait_for(self, ready, what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            out = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")]
            assert time.monotonic() < deadline, f"no {what}: {out}\n{self.logs()}"
            time.sleep(0.2)
