"""Batch rows read one after the other, where documents begin at different places in each.

Read together, such rows would be cut at every border of any of them, and mask what belongs to another row's block. A
row of its own is cut at its own borders only, and sees all of what it is given.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.memory.base import Chunk, State, StateSpec, TensorSpec


def apart(chunk: Chunk) -> bool:
    """Return whether a call's rows are read one by one: several rows whose documents may begin anywhere."""
    return chunk.borders is not None and chunk.rows > 1


def row_chunk(chunk: Chunk, row: int) -> Chunk:
    """Return the place of one row of a call."""
    own = slice(row, row + 1)
    borders = None if chunk.borders is None else chunk.borders[own]
    return Chunk(chunk.starts[own], borders=borders, dropout=chunk.dropout and chunk.dropout.of_rows(own))


def read_rows(
    specs: StateSpec,
    state: State,
    chunk: Chunk,
    block: int,
    read: Callable[[slice, State, Chunk], tuple[Tensor, State]],
) -> tuple[Tensor, State]:
    """Read all rows at once, or one after the other where they are `apart`.

    Arguments: see `read_row_by_row`; `read` gets all rows, slice(None), or one.
    Returns: what is read, [tokens, batch, ...]; the new state.
    """
    if not apart(chunk):
        return read(slice(None), state, chunk)
    rows, state = read_row_by_row(specs, state, chunk, block, read)
    return torch.cat(rows, dim=1), state


def read_row_by_row(
    specs: StateSpec,
    state: State,
    chunk: Chunk,
    block: int,
    read: Callable[[slice, State, Chunk], tuple[Tensor, State]],
) -> tuple[list[Tensor], State]:
    """Read each row with its own part of the state.

    Args:
        specs: declarations of the state, tensors with a batch axis only.
        state: of all rows.
        chunk: where the rows lie.
        block: tokens after which a row's `open` tensors are empty.
        read: from a row's place in the batch, its state and where it lies to what it reads and its new state.
    Returns: what each row reads, tensors with a batch axis of 1 [..., 1, ...]; the state of all rows.
    """
    tensors = {name: spec for name, spec in specs.items() if isinstance(spec, TensorSpec)}
    outputs, states = [], []
    for row, start in enumerate(chunk.starts):
        # columns of an open tensor before the row's own block are those of other rows
        columns = start % block if start > 0 else 0
        own = {name: _own(spec, state[name], row, columns) for name, spec in tensors.items()}
        output, after = read(slice(row, row + 1), own, row_chunk(chunk, row))
        outputs.append(output)
        states.append(after)
    return outputs, {name: _joined(spec, [after[name] for after in states]) for name, spec in tensors.items()}


def _own(spec: TensorSpec, tensor: Tensor, row: int, columns: int) -> Tensor:
    """Return one row of a state tensor [..., batch, ...], and of an open one the last `columns` columns."""
    batch, open_axis = spec.axis("batch"), spec.axis("open")
    assert batch is not None
    tensor = tensor.narrow(batch, row, 1)
    if open_axis is None:
        return tensor
    return tensor.narrow(open_axis, tensor.shape[open_axis] - columns, columns)


def _joined(spec: TensorSpec, rows: list[Tensor]) -> Tensor:
    """Put the rows of a state tensor [..., 1, ...] together; open ones get columns in front, which nobody reads."""
    batch, open_axis = spec.axis("batch"), spec.axis("open")
    assert batch is not None
    if open_axis is not None:
        longest = max(row.shape[open_axis] for row in rows)
        after = rows[0].ndim - 1 - open_axis
        rows = [F.pad(row, (0, 0) * after + (longest - row.shape[open_axis], 0)) for row in rows]
    return torch.cat(rows, dim=batch)
