"""Process groups: how many a rank of 64 is a member of, and which it shares."""

import pytest

from benchmarks.process_groups import LAYOUTS, WORLD, measured

MEMBER = {
    "DP 64": 1,  # alone; its data-parallel group is that of the whole job
    "TP 8 x DP 8": 3,  # tp, dp, alone
    "TP 4 x PP 4 x DP 4": 6,  # tp, dp, pp, model, up and down
    "PP 8 x DP 8": 5,  # dp, pp which is the model's too, alone, up and down
}


def asked_for(tp: int, pp: int) -> int:
    """Groups of all ranks but those of one rank, each asked for by all ranks, and the rank's own."""
    dp = WORLD // (tp * pp)
    sizes = {"tp": tp, "dp": dp, "pp": pp, "model": tp * pp}
    if pp == 1:
        del sizes["model"]  # tp's
    elif tp == 1:
        del sizes["model"]  # pp's
    shared = sum(WORLD // size for size in sizes.values() if 1 < size < WORLD)
    borders = 2 * (WORLD // pp) if pp > 1 else 0
    return shared + borders + any(size == 1 for size in sizes.values())


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if "TP 4" in name else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_rank_of_64_is_member_of_few_groups(layout):
    assert measured("ours", layout) == {"calls": asked_for(*LAYOUTS[layout]), "member": MEMBER[layout]}


def test_megatron_would_make_many_more():
    assert measured("megatron", "DP 64") == {"calls": 710, "member": 17}
