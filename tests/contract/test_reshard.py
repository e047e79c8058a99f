"""Law 9: states saved under one tensor- and data-parallel size and loaded under another continue identically."""

from functools import cache

import pytest

from tests.contract.cases import PATIENCE_S
from tests.contract.driver import largest, within
from tests.contract.observe import TP_SIZES
from tests.contract.reshard import WORLD, straight
from tests.distributed.harness import run_distributed

pytestmark = [pytest.mark.whole_model, pytest.mark.distributed, pytest.mark.timeout(PATIENCE_S + 120)]

# float64: the ranks' partial sums are added in another order
TOLERANCE = 1e-12
reference = cache(straight)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    return run_distributed(WORLD, "tests.contract.reshard:world", str(folder), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("saved", TP_SIZES, ids=lambda tp: f"saved-tp{tp}")
@pytest.mark.parametrize("read", TP_SIZES, ids=lambda tp: f"read-tp{tp}")
def test_another_size_reads_on(ranks, case, saved, read):
    expected = reference(case)
    for rank in ranks:
        first, found = rank[f"{case.id}/{saved}/{read}"]
        own = expected[:, first : first + found.shape[1]]
        within("9 reshard: outputs", largest(found - own) / largest(expected), TOLERANCE)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_the_same_size_gets_its_state_back_bitwise(ranks, case, tp):
    assert all(rank[f"{case.id}/{tp}: same"] for rank in ranks)


def test_the_experiment_has_states_to_lose(case):
    """The memory matters after the place of saving: reading on with fresh states gives something else."""
    from megamem.parallel.linears import PlainLinears
    from tests.contract.driver import CPU, has_memory
    from tests.contract.reshard import ROWS, SAVED, TOKENS, built, read

    stage = built(case, PlainLinears())
    memories = [component for component in stage.components.values() if has_memory(component)]
    fresh = stage.initial_states(ROWS, CPU, reference(case).dtype)
    output, _ = read(stage, fresh, slice(0, ROWS), SAVED, TOKENS)
    differs = largest(output - reference(case)) > 1e-3
    assert differs == bool(memories)
