"""The `megamem` command: assembles the verbs, and reports errors as one line and an exit code.

Verbs import what they need when they run, so that `--help` is instant.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

import typer

from launchers.local_ranks import inside_job
from launchers.signals import not_ignored
from megamem.cli.attention import attention
from megamem.cli.branch import branch
from megamem.cli.checkpoint import checkpoint_app
from megamem.cli.compare import compare
from megamem.cli.convert import convert_app
from megamem.cli.corpus import corpus_app
from megamem.cli.demo import demo
from megamem.cli.doctor import doctor
from megamem.cli.evaluate import evaluate
from megamem.cli.generate import generate
from megamem.cli.launch import agent, launch
from megamem.cli.long_term_memory import long_term_memory
from megamem.cli.mechanisms import mechanisms
from megamem.cli.memory_length import memory_length
from megamem.cli.plan import plan
from megamem.cli.preflight import preflight
from megamem.cli.probe import probe_app
from megamem.cli.recovered_share import recovered_share
from megamem.cli.remembered import remembered
from megamem.cli.runs import runs
from megamem.cli.shards import shards_app
from megamem.cli.status import status
from megamem.cli.study import study_app
from megamem.cli.tasks import tasks_app
from megamem.cli.tokenizer import tokenizer_app
from megamem.cli.train import start_from, train
from megamem.cli.verify_resume import verify_resume
from megamem.cli.wandb import wandb_app
from megamem.errors import CheckpointError, ConfigError, MegamemError, NonFiniteError, RunFolderError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
for name, group in {
    "corpus": corpus_app, "tokenizer": tokenizer_app, "shards": shards_app, "checkpoint": checkpoint_app,
    "convert": convert_app, "study": study_app, "probe": probe_app, "tasks": tasks_app,
    "wandb": wandb_app,
}.items():  # fmt: skip
    app.add_typer(group, name=name)
# a function's name is the verb's, with dashes
for verb in (
    train, start_from, branch, demo, plan, launch, preflight, status, runs, generate, evaluate, verify_resume, doctor,
    mechanisms, long_term_memory, memory_length, attention, recovered_share, compare,
    remembered,
):  # fmt: skip
    app.command()(verb)
app.command(hidden=True)(agent)

FOUND_BY_ALL = (ConfigError, NonFiniteError, CheckpointError, RunFolderError)
"""Errors that all ranks of a job find, and that the first rank of each node reports for them."""

FIRST_RANK_S = 20
"""Seconds in which the first rank of a node has found what another of its ranks has, in a job whose ranks keep step."""


def main() -> None:
    """Run the command; a MegamemError becomes one line on standard error and its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # it warns where the home folder cannot be written, and when it lists the fonts of a machine for the first time
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        if inside_job() and isinstance(ended.code, int):  # typer's always are
            _end_rank(ended.code)
        raise
    except MegamemError as error:
        if isinstance(error, FOUND_BY_ALL) and not _is_first_of_node():
            _wait_to_be_ended()
        sys.stderr.write(_line(error))
        sys.stderr.flush()
        _leave(error.exit_code)
    except RuntimeError as error:
        if not inside_job() or "by peer" not in str(error):
            raise
        sys.stderr.write(f"megamem: rank {os.environ['RANK']}: lost its connection to another rank, which has ended\n")
        _leave(MegamemError.exit_code)


def _is_first_of_node() -> bool:
    """Return whether this is the first rank of its node, or no rank of a job."""
    return not inside_job() or os.environ.get("LOCAL_RANK", "0") == "0"


def _wait_to_be_ended() -> None:
    """Wait until the launcher ends this rank, as it does once the first rank has ended with the error that it reports.

    A launcher ends all ranks when one has ended: if this one were faster, nobody would have said why. Returns where the
    first rank has not ended in time, since it has not found what this rank has.
    """
    for number in not_ignored():
        signal.signal(number, signal.SIG_DFL)
    time.sleep(FIRST_RANK_S)


def _line(error: MegamemError) -> str:
    """Return the line that this process prints of an error: which rank it comes from, unless it is of them all."""
    rank = os.environ["RANK"] if inside_job() else "0"
    of_all = isinstance(error, FOUND_BY_ALL) and _is_first_of_node()
    named = rank == "0" or of_all or str(error).startswith("rank ")
    text = str(error).replace("\n", "\\n")  # a path may hold a line break
    return f"megamem: {text}\n" if named else f"megamem: rank {rank}: {text}\n"


def _end_rank(code: int) -> NoReturn:
    """End this rank, whose work is done, by everything that is to happen at its end but the interpreter's own end.

    Libraries keep process groups to the last. Their threads are at work until the process is gone, and one that lets go
    of a tensor while the interpreter is taken down aborts a rank that has done all it should.

    Raises: OSError where the last of what it prints cannot be written.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does first, and then the next line
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(code: int) -> None:
    """End this rank now: its peers may sit in a collective that will never complete."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if inside_job():
        os._exit(code)
    sys.exit(code)
