"""How calls fall into blocks: against a token-by-token simulation of every row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamem.memory.base import Chunk
from megamem.memory.shared.blocks import BlockSlice, block_slices, open_visible, positions_in_block

CPU = torch.device("cpu")


def position_of(chunk, row, at):
    """Position in its document of the call's token `at`, by walking there."""
    position = chunk.starts[row]
    for place in range(1, at + 1):
        position = 0 if place in chunk.borders[row] else position + 1
    return position


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    starts=st.lists(st.integers(-20, 40), min_size=1, max_size=4),
    borders=st.lists(st.sets(st.integers(1, 39), max_size=4), min_size=4, max_size=4),
    tokens=st.integers(1, 40),
    block=st.integers(1, 9),
)
def test_block_slices_tile_the_call_and_no_row_crosses_a_border(starts, borders, tokens, block):
    chunk = Chunk(tuple(starts), borders=tuple(tuple(sorted(row)) for row in borders[: len(starts)]))
    found = block_slices(chunk, tokens, block)
    assert [block_slice.begin for block_slice in found] == [0, *(block_slice.end for block_slice in found[:-1])]
    assert found[-1].end == tokens
    cuts = {0, tokens}
    for block_slice in found:
        assert block_slice.begin < block_slice.end
        for row in range(len(starts)):
            positions = [position_of(chunk, row, at) for at in range(block_slice.begin, block_slice.end)]
            assert positions == list(range(block_slice.starts[row], block_slice.ends[row]))
            assert len({p // block for p in positions}) == 1
    for row in range(len(starts)):
        begun = {at for at in chunk.borders[row] if at < tokens}
        cuts |= begun | {at for at in range(1, tokens) if position_of(chunk, row, at) % block == 0}
    # and it is cut nowhere else
    assert {block_slice.begin for block_slice in found} == cuts - {tokens}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    first=st.lists(st.integers(-12, 0), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=10),
    block=st.integers(1, 6),
)
def test_the_open_buffer_holds_each_row_s_unfinished_block(first, sizes, block):
    """Runs the bookkeeping over several calls, with a list of (row, position) in place of tensors."""
    starts, buffer = tuple(first), []
    for tokens in sizes:
        for block_slice in block_slices(Chunk(starts), tokens, block):
            open_tokens = len(buffer)
            positions = positions_in_block(block_slice, open_tokens, CPU).expand(-1, len(starts))
            visible = open_visible(block_slice, open_tokens, CPU)
            seen = torch.ones(open_tokens, len(starts), dtype=torch.bool) if visible is None else visible
            columns = buffer + [[start + i for start in block_slice.starts] for i in range(block_slice.tokens)]
            for row, start in enumerate(block_slice.starts):
                # what a row may see of the buffer is exactly its document's unfinished block
                own = [column[row] for column, ok in zip(buffer, seen[:, row].tolist(), strict=True) if ok]
                expected = list(range(start - start % block, start)) if start > 0 else []
                assert own == expected
                assert block_slice.offsets[row] == len(expected)
                # and positions count from the block's first token
                for column, position in zip(columns, positions[:, row].tolist(), strict=True):
                    if column[row] >= 0 and column[row] // block == max(start, 0) // block:
                        assert position == column[row] % block
                end = block_slice.ends[row]
                assert block_slice.closing[row] == (end > 0 and end % block == 0)
                if block_slice.closing[row]:
                    assert [column[row] for column in columns[-block:]] == list(range(end - block, end))
            buffer = columns[len(columns) - block_slice.open_tokens_after :]
        starts = tuple(start + tokens for start in starts)


@pytest.mark.parametrize(
    ("starts", "end", "offsets", "closing", "open_after"),
    [
        ((0, 0), 4, (0, 0), (True, True), 0),
        ((2, 2), 1, (2, 2), (False, False), 3),
        ((4, 6), 2, (0, 2), (False, True), 2),
        # padding has no offset and closes nothing, even where its negative position is a multiple of the block
        ((-8, 0), 4, (0, 0), (False, True), 0),
        ((-3, 5), 3, (0, 1), (False, True), 0),
    ],
)
def test_block_slices_by_hand(starts, end, offsets, closing, open_after):
    block_slice = BlockSlice(0, end, starts, 4)
    assert block_slice.offsets == offsets
    assert block_slice.closing == closing
    assert block_slice.open_tokens_after == open_after


def test_rows_in_step_need_no_mask_and_share_their_positions():
    block_slice = BlockSlice(0, 2, (9, 5), 4)
    assert open_visible(block_slice, 1, CPU) is None
    assert positions_in_block(block_slice, 1, CPU).tolist() == [[0], [1], [2]]


def test_a_row_that_starts_afresh_sees_nothing_of_the_buffer():
    block_slice = BlockSlice(0, 2, (10, 0), 4)
    assert open_visible(block_slice, 2, CPU).tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("starts", "tokens", "parts"),
    [
        ((0, 5), 4, [(0, 4)]),
        ((-2, 0), 4, [(0, 2), (2, 4)]),
        ((-4, -6), 4, [(0, 4)]),
        ((-1, -3, -3, 7), 4, [(0, 1), (1, 3), (3, 4)]),
    ],
)
def test_calls_are_cut_where_left_padding_ends(starts, tokens, parts):
    assert [(part.start, part.stop) for part in Chunk(starts).padding_splits(tokens)] == parts


def test_chunk_knows_where_documents_begin_inside():
    chunk = Chunk((4, -2), borders=((3, 5), ()))
    assert chunk.begins_inside
    assert chunk.positions(7).T.tolist() == [[4, 5, 6, 0, 1, 0, 1], [-2, -1, 0, 1, 2, 3, 4]]
    assert chunk.after(3) == Chunk((0, 1), borders=((2,), ()))
    assert chunk.after(7) == Chunk((2, 5), borders=((), ()))
    assert chunk.part(2, 5) == Chunk((6, 0), borders=((1,), ()))
    assert [(part.start, part.stop) for part in chunk.document_splits(5)] == [(0, 3), (3, 5)]
    assert not Chunk((4, 4), borders=((), ())).begins_inside
    assert Chunk((4, 4)).positions(2).tolist() == [[4], [5]]


def test_chunk_counts_positions_and_fresh_rows():
    chunk = Chunk((-3, 0, 8))
    assert chunk.rows == 3
    assert chunk.fresh() == (True, True, False)
    assert chunk.after(3).starts == (0, 3, 11)
    assert chunk.after(4).fresh() == (False, False, False)
