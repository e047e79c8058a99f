"""The lists of mutants fit the code, and a trial tells what tests notice (docs/architecture.md#what-tests-notice)."""

import subprocess
from collections import Counter

import pytest

from tests.mutants.__main__ import report, try_all
from tests.mutants.mutant import LISTS, ROOT, Mutant, read_lists

MUTANTS = read_lists()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.title)
def test_a_mutation_can_be_made(mutant):
    """Its old text stands in the file once, the new one is Python, and its tests are there."""
    mutant.check(ROOT)


def test_names_and_mutations_are_unique():
    assert not [title for title, count in Counter(mutant.title for mutant in MUTANTS).items() if count > 1]
    assert not [
        key for key, count in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if count > 1
    ]  # fmt: skip


def test_lists_are_as_long_as_the_page_says():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"{len(MUTANTS)} mutants in {len(LISTS)} lists" in page


def made(file="megamem/doubled.py", old="2 * x", new="3 * x", tests="tests/test_doubled.py", **fields):
    return Mutant(
        **{
            "area": "area",
            "name": "name",
            "file": file,
            "old": old,
            "new": new,
            "breaks": "it",
            "tests": tests,
            **fields,
        }
    )


@pytest.fixture
def root(tmp_path):
    """A repository with one function, and a test of it."""
    files = {
        "megamem/__init__.py": "",
        "megamem/doubled.py": "def doubled(x):\n    y = 2 * x\n    return y\n",
        "tests/__init__.py": "",
        "tests/test_doubled.py": "from megamem.doubled import doubled\n\n\ndef test_doubled():\n"
        "    assert doubled(2) == 4\n\n\ndef test_nothing():\n    assert doubled(0) == 0\n",
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
        "tests/test_skipped.py": "import pytest\n\n\ndef test_skipped():\n    pytest.skip('nothing to test here')\n",
    }
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "root", check=True)
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"old": "4 * x"}, r"area/name: `4 \* x` stands 0 times in megamem/doubled.py"),
        ({"old": "x"}, "stands 2 times"),
        ({"new": "2 * x"}, "the new text is the old one"),
        ({"tests": "tests/test_tripled.py"}, "there is no file tests/test_tripled.py"),
        ({"tests": "tests/test_doubled.py::test_tripled"}, "tests/test_doubled.py has no test_tripled"),
    ],
)
def test_a_mutant_that_no_longer_fits_is_named(root, changes, said):
    with pytest.raises(ValueError, match=said):
        made(**changes).check(root)


def test_a_mutant_that_is_no_python(root):
    with pytest.raises(SyntaxError):
        made(new="2 *").check(root)


def test_verdicts(root, capsys):
    """One after the other in one copy: nothing of one is left for the next, and the repository stays as it is."""
    before = (root / "megamem/doubled.py").read_text()
    mutants = [
        made(name="a_noticed"),
        made(name="b_not_looked_at", tests="tests/test_doubled.py -k nothing"),
        made(name="c_by_an_import", old="def doubled", new="def tripled"),
        made(name="d_noticed_again", new="4 * x"),
        made(name="e_red_without", tests="tests/test_broken.py"),
        made(name="f_nothing_tested", tests="tests/test_skipped.py"),
    ]
    outcomes, errors = try_all(mutants, 1, root)
    assert {mutant.name: outcome.verdict for mutant, outcome in outcomes.items()} == {
        "a_noticed": "killed", "b_not_looked_at": "survived", "c_by_an_import": "killed", "d_noticed_again": "killed",
    }  # fmt: skip
    assert outcomes[mutants[0]].first_failure == "tests/test_doubled.py::test_doubled"
    assert [error.split(": ")[0] for error in errors] == ["area/e_red_without", "area/f_nothing_tested"]
    assert all("do not pass without the mutation" in error for error in errors)
    assert (root / "megamem/doubled.py").read_text() == before
    said = report(mutants, outcomes, errors)
    assert "all                  4       3  75.0%" in said
    assert "survived: area/b_not_looked_at: it" in said
    assert capsys.readouterr().out.count("\n") == len(mutants)


def test_a_hang_counts_as_noticed_and_is_listed(root, monkeypatch):
    monkeypatch.setattr("tests.mutants.trial.AT_LEAST_S", 5)
    mutant = made(old="    y = 2 * x\n", new="    y = 2 * x\n    while True:\n        pass\n")
    outcomes, errors = try_all([mutant], 1, root)
    assert (outcomes[mutant].verdict, outcomes[mutant].killed, errors) == ("hung", True, [])
    assert "hung: area/name" in report([mutant], outcomes, errors)
