"""README's two commands, `make demo` and `make test`, where a machine is less kind than its author's.

    python3 tests/readme/hostile.py              both commands, shortened, under each circumstance and under all at once
    python3 tests/readme/hostile.py --full       both commands in full, half an hour, under all at once
    python3 tests/readme/hostile.py umask home   shortened, under these two at once

Everything happens in a copy of the checkout in a temporary folder and with an environment of its own there. It runs as
an ordinary user: whoever starts it or, for root, one that is made for the time being. Needs git and Python alone.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CIRCUMSTANCES = {
    "plain": "nothing but an ordinary user",
    "nohup": "SIGHUP is ignored, as `nohup` has it",
    "background": "SIGINT and SIGQUIT are ignored, as a script without job control has it in its background",
    "umask": "umask 077: what is made is nobody else's to read",
    "lang": "LANG=C",
    "lc_all": "LC_ALL=C, which Python coerces to no other locale",
    "home": "a home that cannot be written",
    "folder": "a checkout below a folder whose name has a space and an umlaut",
}
USER = f"megamem-{os.getpid()}"
"""The user that is made for root."""
FEW_STEPS = "training.steps=4 optimizer.warmup_ratio=0.5 evaluation.every=2 evaluation.max_tokens=2048 "
FEW_STEPS += "evaluation.final_max_tokens=4096"
SHORT_TESTS = (
    "tests/unit/test_process.py tests/unit/test_launcher.py tests/unit/test_makefile.py tests/unit/test_files.py "
    "tests/unit/test_tensor_files.py tests/unit/test_run_folder.py tests/unit/test_hippo_bank.py "
    "tests/unit/test_docs.py tests/unit/test_readers.py tests/unit/test_study_signals.py tests/unit/test_wandb.py "
    "tests/unit/test_cli_data.py "
    "tests/integration/test_agent.py::TestStops tests/integration/test_interrupts.py::TestSignals"
)
"""Tests of signals, files, modes, texts, homes and processes; of both kinds that `make test` runs in turn."""
SHORT = {
    "demo": [f"OVERRIDES={FEW_STEPS}"],
    "test": [f"OWN_TESTS={SHORT_TESTS}", f"ALONE_TESTS={SHORT_TESTS}"],
}
LIMIT_S = {"install": 1800, "demo": 3600, "test": 3 * 3600}
NOT_PASSED_ON = ("LANG", "VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "RANK", "WORLD_SIZE")
"""Variables of a shell, a make or a job around this script."""


@dataclass(frozen=True)
class Place:
    """A temporary folder with checkouts, homes and logs, and the user whose they are."""

    folder: Path
    user: pwd.struct_passwd | None
    """None: whoever runs this."""

    def checkout(self, names: Sequence[str]) -> Path:
        """Return the checkout for these circumstances, a clone with what is not committed where there is none yet."""
        found = self.folder / ("my möbel folder" if "folder" in names else "plain") / "megamem"
        if not found.exists():
            subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), found], check=True)
            listed = subprocess.run(
                ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
            for name in listed.stdout.decode().split("\0"):
                if not name:
                    continue
                (found / name).unlink(missing_ok=True)
                if (ROOT / name).exists():
                    (found / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, found / name, follow_symlinks=False)
            self.give(found.parent)
        return found

    def home(self, names: Sequence[str]) -> Path:
        """Return the home folder for these circumstances, made where there is none yet."""
        found = self.folder / ("closed" if "home" in names else "home")
        if not found.exists():
            found.mkdir()
            if "home" in names:
                found.chmod(0o555)  # and root's, if root runs this
            else:
                self.give(found)
        return found

    def give(self, folder: Path) -> None:
        """Make a folder and all in it the user's."""
        for path in (folder, *folder.rglob("*")) if self.user else ():
            os.chown(path, self.user.pw_uid, self.user.pw_gid, follow_symlinks=False)

    def environment(self, names: Sequence[str]) -> dict[str, str]:
        """Return the variables of a command under these circumstances."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_PASSED_ON and not name.startswith(("LC_", "PYTHON", "XDG_", "MEGAMEM_"))
        }
        if "PIP_CONFIG_FILE" not in kept and (self.folder / "pip.conf").exists():
            kept["PIP_CONFIG_FILE"] = str(self.folder / "pip.conf")
        locale = {"LANG": "C"} if "lang" in names else {"LANG": "C.UTF-8"}
        locale |= {"LC_ALL": "C"} if "lc_all" in names else {}
        user = {"USER": self.user.pw_name, "LOGNAME": self.user.pw_name} if self.user else {}
        return {**kept, **locale, **user, "HOME": str(self.home(names))}

    def make(self, names: Sequence[str], target: str, variables: Sequence[str] = ()) -> bool:
        """Run `make` under these circumstances, say how it ended, and return whether well."""
        label = f"{target}, {' '.join(names)}"
        log = self.folder / "logs" / f"{'+'.join(names)}-{target}.log"
        log.parent.mkdir(exist_ok=True)
        words = [*(["nohup"] if "nohup" in names else ()), "make", target, *variables]
        if "background" in names:
            words = ["sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh", *words]
        as_user = {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []} if self.user else {}
        mask = {"umask": 0o077 if "umask" in names else 0o022}
        begun = time.monotonic()
        with log.open("wb") as file, subprocess.Popen(
            words, cwd=self.checkout(names), env=self.environment(names), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True, **as_user, **mask,
        ) as process:  # fmt: skip
            try:
                code: int | str = process.wait(LIMIT_S[target])
            except subprocess.TimeoutExpired:
                code = f"none after {LIMIT_S[target]} s"
            finally:
                ended = process.poll() is not None
                if not ended:
                    os.killpg(process.pid, signal.SIGKILL)
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        print(f"{'passed' if code == 0 else 'FAILED'}  {label}, {time.monotonic() - begun:.0f} s", flush=True)
        if code != 0:
            print("\n".join(["  exit code " + str(code), *(f"  | {line}" for line in said[-40:])]), flush=True)
        return code == 0


@contextmanager
def ordinary_user() -> Iterator[pwd.struct_passwd | None]:
    """Make a user for root and remove it in the end; None for anybody else, who is one already."""
    if os.geteuid() != 0:
        print(f"as {pwd.getpwuid(os.geteuid()).pw_name}: no user is made, which takes root", flush=True)
        yield None
        return
    subprocess.run(["useradd", "--system", "--no-create-home", USER], check=True)
    try:
        yield pwd.getpwnam(USER)
    finally:
        subprocess.run(["userdel", USER], check=True)


@contextmanager
def place() -> Iterator[Place]:
    """Make a temporary folder that every user may enter; it is removed in the end."""
    with ordinary_user() as user, tempfile.TemporaryDirectory(prefix="megamem-readme-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for own in (Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"):
            if own.exists():  # the package index that this machine uses is no circumstance
                shutil.copy(own, folder / "pip.conf")
                (folder / "pip.conf").chmod(0o644)
                break
        yield Place(folder, user)


def main() -> int:
    """Run what the command line asks for; return 1 if anything failed."""
    listed = "\n".join(f"  {name:12}{what}" for name, what in CIRCUMSTANCES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"circumstances:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *CIRCUMSTANCES], help="circumstances, all of them at once")
    parser.add_argument("--full", action="store_true", help="both commands in full, not a few steps and tests of each")
    chosen = parser.parse_args()
    everything = [name for name in CIRCUMSTANCES if name != "plain"]
    together = chosen.names or everything
    rounds = [together] if chosen.names or chosen.full else [*([name] for name in CIRCUMSTANCES), together]
    results = []
    with place() as here:
        for names in rounds:
            for target in ("install", "demo", "test"):
                results.append(here.make(names, target, [] if chosen.full else SHORT.get(target, [])))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
