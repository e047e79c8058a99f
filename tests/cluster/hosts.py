"""Machines on this one: sshd of their own on addresses of the loopback, and network namespaces with a link between."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

SSHD = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/{address}.pid
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PermitUserEnvironment no
AcceptEnv -
SetEnv PYTHONPATH={python_path}
"""


class SshHosts:
    """sshd on each address, with keys of its own. A context manager; `options` is what `ssh.options` takes."""

    def __init__(self, folder: Path, addresses: list[str], port: int) -> None:
        self.folder, self.addresses, self.port = folder, addresses, port
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.options = [
            f"IdentityFile={folder}/user_key", "IdentitiesOnly=yes", f"UserKnownHostsFile={folder}/known_hosts",
            "StrictHostKeyChecking=yes", "LogLevel=ERROR",
        ]  # fmt: skip

    def __enter__(self) -> SshHosts:
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        kind, key = (self.folder / "host_key.pub").read_text().split()[:2]
        known = "".join(f"[{address}]:{self.port} {kind} {key}\n" for address in self.addresses)
        (self.folder / "known_hosts").write_text(known)
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd leaves its privileges; the package's service makes it
        sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
        assert sshd
        for address in self.addresses:
            path = self.folder / f"sshd-{address}"
            path.write_text(
                SSHD.format(
                    port=self.port, address=address, folder=self.folder, python_path=os.environ.get("PYTHONPATH", "")
                )
            )
            log = self.folder / f"{address}.log"
            self._daemons.append(subprocess.Popen([sshd, "-D", "-f", path, "-E", log], stderr=subprocess.DEVNULL))
        for address in self.addresses:
            self._wait_for(address)
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(20)

    def _wait_for(self, address: str) -> None:
        options = [word for option in self.options for word in ("-o", option)]
        command = ["ssh", "-o", "BatchMode=yes", *options, "-p", str(self.port), address, "true"]
        for _ in range(50):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"{done.stderr}\n{(self.folder / f'{address}.log').read_text()}")


class Network:
    """Two hosts with names, addresses and a cable: network namespaces joined by veth. A context manager."""

    NAMES = ("host-a", "host-b")
    ADDRESSES = ("10.97.0.1", "10.97.0.2")

    def __init__(self) -> None:
        mark = f"{os.getpid():x}"[-6:]
        self.spaces = [f"mm{mark}{end}" for end in "ab"]

    def __enter__(self) -> Network:
        first, second = self.spaces
        for space in self.spaces:
            _ip("netns", "add", space)
        _ip("link", "add", "name", first, "type", "veth", "peer", "name", second)
        for space, address in zip(self.spaces, self.ADDRESSES, strict=True):
            _ip("link", "set", space, "netns", space)
            self.inside(space, "link", "set", space, "name", "cable0")
            self.inside(space, "addr", "add", f"{address}/24", "dev", "cable0")
            for device in ("lo", "cable0"):
                self.inside(space, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False)  # the cable goes with it

    @staticmethod
    def inside(space: str, *command: str) -> None:
        _ip("-netns", space, *command)

    def cut(self) -> None:
        """Unplug the cable."""
        for space in self.spaces:
            self.inside(space, "link", "set", "cable0", "down")

    def mend(self) -> None:
        for space in self.spaces:
            self.inside(space, "link", "set", "cable0", "up")

    def command(self, host: int, *words: str) -> list[str]:
        """`words` as a command on a host, which has its own name, network and no other."""
        name = f'hostname {self.NAMES[host]} && exec "$@"'
        return ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c", name, "sh", *words]


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
