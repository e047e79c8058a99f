"""Every law runs on every case; the worst error of each law is printed at the end."""

import pytest

from tests.contract.cases import ALL_CASES, ALONE, ARCHITECTURES, CASES
from tests.contract.driver import WORST
from tests.contract.paths import CALLS, PATH


def pytest_generate_tests(metafunc):
    """Give laws their cases.

    Laws of whole models run on architectures too: those that take a `subject`, or are marked `whole_model`. What is
    marked `every_case` takes so little that it runs on all mixers, whatever MEGAMEM_CASES leaves out.
    """
    if "case" not in metafunc.fixturenames:
        return
    if "subject" in metafunc.fixturenames:
        pairs = [(case, subject) for case in [*CASES, *ARCHITECTURES] for subject in case.subjects]
        metafunc.parametrize(("case", "subject"), pairs, ids=[f"{case.id}-{subject}" for case, subject in pairs])
        return
    if metafunc.definition.get_closest_marker("every_case") is not None:
        metafunc.parametrize("case", CASES if ALONE else ALL_CASES, ids=lambda case: case.id)
        return
    whole = metafunc.definition.get_closest_marker("whole_model") is not None
    metafunc.parametrize("case", [*CASES, *ARCHITECTURES] if whole else CASES, ids=lambda case: case.id)


def pytest_sessionfinish(session):
    """A worker process of pytest-xdist tells the one that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["worst"] = WORST
        session.config.workeroutput["calls"] = CALLS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for law, (error, tolerance) in getattr(node, "workeroutput", {}).get("worst", {}).items():
        WORST[law] = max(WORST.get(law, (0.0, tolerance)), (error, tolerance))
    for path, calls in getattr(node, "workeroutput", {}).get("calls", {}).items():
        CALLS[path] += calls


def pytest_terminal_summary(terminalreporter):
    if WORST:
        terminalreporter.section("worst error per law")
        for law, (error, tolerance) in sorted(WORST.items()):
            terminalreporter.line(f"{law:45} {error:8.1e}   allowed {tolerance:.3g}")
    if PATH in CALLS:
        terminalreporter.line(f"computed along the path {PATH}: {CALLS[PATH]} times, other processes not counted")
