"""Every law runs on every case."""

from tests.contract.cases import CASES


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=lambda case: case.id)
