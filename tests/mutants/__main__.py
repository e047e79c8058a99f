"""Try the mutants of all lists and print which ones the tests kill.

    python -m tests.mutants [--only PATTERN] [--jobs N] [--list]

Ends with 1 when fewer than 95 % are killed, or when tests fail without a mutation.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from tests.mutants.mutant import ROOT, Mutant, read_lists
from tests.mutants.trial import CONTEXT, Copy, Outcome, TrialError

ENOUGH = 0.95
QUICK = "tests/unit/"
"""What the tests of one process begin with; others start several or whole runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Put slips into copies of the code and see whether the tests notice.",
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as 'data/*' or '*mask*'")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="copies of the repository, side by side")
    parser.add_argument("--list", action="store_true", help="print the mutants and what they break, and try none")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read_lists() if fnmatch(mutant.title, options.only)]
    if not mutants:
        parser.error(f"--only {options.only}: no mutant has such a name")
    for mutant in mutants:
        mutant.check(ROOT)
    if options.list:
        print("\n".join(f"{mutant.title}: {mutant.breaks}" for mutant in mutants))
        return 0
    CONTEXT.set_forkserver_preload(["tests.mutants.preload"])
    outcomes, errors = try_all(mutants, options.jobs, ROOT)
    print(report(mutants, outcomes, errors))
    killed = sum(outcome.killed for outcome in outcomes.values())
    return int(bool(errors) or killed < ENOUGH * len(outcomes))


def try_all(mutants: Sequence[Mutant], jobs: int, root: Path) -> tuple[dict[Mutant, Outcome], list[str]]:
    """Try each mutant in one of `jobs` copies; returns what became of them, and why others have no verdict."""
    # those of one process first; those with the same tests one after the other, as their run without a mutation counts
    # for all
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in sorted(mutants, key=lambda mutant: (not mutant.tests.startswith(QUICK), mutant.tests, mutant.cases)):
        waiting.put(mutant)
    outcomes: dict[Mutant, Outcome] = {}
    errors: list[str] = []

    def work(folder: Path) -> None:
        try:
            copy = Copy(root, folder)
            copy.check_imports()
        except Exception as error:
            errors.append(str(error))
            return
        while True:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcome = outcomes[mutant] = copy.try_mutant(mutant)
            except TrialError as error:
                errors.append(str(error))
                print(f"[{len(outcomes) + len(errors)}/{len(mutants)}] error    {mutant.title}", flush=True)
                continue
            print(
                f"[{len(outcomes) + len(errors)}/{len(mutants)}] {outcome.verdict:8} {mutant.title}"
                f" ({outcome.seconds:.0f} s) {outcome.first_failure}",
                flush=True,
            )

    with tempfile.TemporaryDirectory(prefix="megamem-mutants-") as name:
        threads = []
        for number in range(jobs):
            folder = Path(name) / str(number)
            folder.mkdir()
            threads.append(threading.Thread(target=work, args=(folder,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcomes, errors


def report(mutants: Sequence[Mutant], outcomes: dict[Mutant, Outcome], errors: Sequence[str]) -> str:
    """Return the table of areas, the survivors, and what hung or could not be tried."""
    lines = ["", f"{'area':14} {'mutants':>7} {'killed':>7} {'rate':>6}"]
    for area in dict.fromkeys(mutant.area for mutant in mutants):
        lines.append(_row(area, [outcome for mutant, outcome in outcomes.items() if mutant.area == area]))
    lines.append(_row("all", list(outcomes.values())))
    for mutant, outcome in outcomes.items():
        if outcome.verdict == "hung":
            lines.append(f"hung: {mutant.title}")
    for mutant, outcome in outcomes.items():
        if not outcome.killed:
            lines.append(f"survived: {mutant.title}: {mutant.breaks}")
    return "\n".join([*lines, *(f"no verdict: {error}" for error in errors)])


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    killed = sum(outcome.killed for outcome in outcomes)
    rate = f"{killed / len(outcomes):.1%}" if outcomes else "-"
    return f"{name:14} {len(outcomes):7} {killed:7} {rate:>6}"


if __name__ == "__main__":
    sys.exit(main())
