"""The order of windows on one stage."""

import itertools

import pytest

from megamem.pipeline.schedule import WindowPass, window_schedule

SIZES = [(sequences, chunks, bptt) for sequences in (1, 3) for chunks in (1, 4, 6) for bptt in (1, 2, 3, chunks)]
VALID = sorted({size for size in SIZES if size[1] % size[2] == 0})


@pytest.mark.parametrize(("sequences", "chunks", "bptt"), VALID)
def test_every_chunk_runs_once_in_order(sequences, chunks, bptt):
    passes = list(window_schedule(sequences, chunks, bptt))
    units = [(p.sequence, chunk) for p in passes for chunk in p.chunks]
    assert units == list(itertools.product(range(sequences), range(chunks)))
    assert all(len(p.chunks) == bptt for p in passes)
    assert len(passes) == sequences * chunks // bptt


@pytest.mark.parametrize(("sequences", "chunks", "bptt"), VALID)
def test_only_the_first_window_of_a_sequence_begins(sequences, chunks, bptt):
    begins = [(p.sequence, p.first) for p in window_schedule(sequences, chunks, bptt) if p.begins]
    assert begins == [(sequence, 0) for sequence in range(sequences)]


def test_a_window_is_inclusive():
    window = WindowPass(sequence=1, first=2, last=3)
    assert list(window.chunks) == [2, 3]
    assert not window.begins


@pytest.mark.parametrize(("chunks", "bptt"), [(4, 3), (2, 4), (5, 2)])
def test_windows_that_do_not_divide_are_refused(chunks, bptt):
    with pytest.raises(ValueError, match=f"bptt_chunks {bptt} does not divide {chunks} chunks"):
        list(window_schedule(1, chunks, bptt))
