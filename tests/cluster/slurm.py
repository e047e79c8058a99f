"""A SLURM cluster of two nodes on this machine: munged, slurmctld and slurmd of its own, all files in one folder."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from tests.integration.ports import free_port

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/linear
ReturnToService=2
KillWait=20
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


NODES = {"node-a": "127.0.0.2", "node-b": "127.0.0.3"}


class Slurm:
    """A context manager; `environment` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        (self.folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={free_port()} CPUs={os.cpu_count()}"
            for name, address in NODES.items()
        ]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(host=host, folder=self.folder, controller_port=free_port(), nodes="\n".join(nodes))
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = {"key-file": key, "socket": "munge.socket", "log-file": "munge.log", "pid-file": "munge.pid"}
        files = [f"--{name}={self.folder / path}" for name, path in munge.items()]
        self._start("munged", "--foreground", "--force", *files, f"--seed-file={self.folder / 'munge.seed'}")
        self._wait_for(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        hosts = self.folder / "hosts"
        hosts.write_text(
            "\n".join(["127.0.0.1 localhost", f"127.0.0.1 {host}", *(f"{a} {n}" for n, a in NODES.items()), ""])
        )
        for name in NODES:  # for the daemon and its jobs alone, the nodes' names lead to addresses
            private = f"mount --bind {hosts} /etc/hosts && exec slurmd -D -N {name}"
            self._start("unshare", "--mount", "sh", "-c", private, name=name)
        self._wait_for(lambda: self._idle() == len(NODES), "idle nodes")
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        deadline = time.monotonic() + 40
        while self.run("squeue", "--noheader", check=False) and time.monotonic() < deadline:
            time.sleep(0.3)
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

    def _idle(self) -> int:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split().count("idle")

    def _start(self, *command: str, name: str = "") -> None:
        log = (self.folder / f"{name or command[0]}.out").open("wb")
        self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait_for(self, ready, what: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            out = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")]
            assert time.monotonic() < deadline, f"no {what}: {out}\n{self.logs()}"
            time.sleep(0.2)
