"""No registered mixer escapes the laws."""

import importlib.util
from pathlib import Path

from megamem.config.model import ARCHITECTURES, MIXERS
from tests.contract.cases import ALL_ARCHITECTURES, ALL_CASES


def test_every_registered_mixer_has_a_case():
    # those that only work on side rows run inside whole models
    inside = {case.model().mixer_at(0).kind for case in ALL_ARCHITECTURES}
    missing = set(MIXERS.kinds()) - {case.kind for case in ALL_CASES} - inside
    assert not missing, f"add cases for {sorted(missing)} to tests/contract/cases.py"


def test_every_registered_mixer_has_an_oracle():
    missing = [k for k in MIXERS.kinds() if importlib.util.find_spec(f"tests.contract.oracles.{k}") is None]
    assert not missing, f"write tests/contract/oracles/{missing[0]}.py"


def test_every_registered_architecture_has_a_case():
    # the laws are of models that read text from its start to its end
    causal = {kind for kind, config in ARCHITECTURES.kinds().items() if config.causal}
    missing = causal - {case.kind for case in ALL_ARCHITECTURES}
    assert not missing, f"add cases for {sorted(missing)} to tests/contract/cases.py"


def test_case_names_are_unique():
    cases = [*ALL_CASES, *ALL_ARCHITECTURES]
    assert len({case.id for case in cases}) == len(cases)


def test_cases_build_the_mixer_they_name():
    assert all(case.model().mixer_at(0).kind == case.kind for case in ALL_CASES)
    assert all(case.model().architecture.kind == case.kind for case in ALL_ARCHITECTURES)


def test_the_page_counts_the_cases():
    text = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
    core = [sum(case.core for case in cases) for cases in (ALL_CASES, ALL_ARCHITECTURES)]
    assert f"`make test` runs {core[0]} cases of mixers and {core[1]} of whole models" in text
    assert f"`make test-full` runs all {len(ALL_CASES)} and {len(ALL_ARCHITECTURES)}:" in text
