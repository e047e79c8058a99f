"""Memories that lie in host memory: where they are, and how many bytes of them are copied to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from megamem.costs.state_bytes import host_memory
from megamem.memory.base import Chunk
from megamem.ops.deep_memory.kept import Copies
from tests.unit.caching_helpers import CHUNK, ROWS, TITANS, built, hidden, model_of

CHUNKS, SEGMENT = 5, 4
ON_DEVICE = ("pool", "filled")
"""What the router reads of a past chunk's memories; all else is in host memory."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each copy as it is made."""
    sizes: list[int] = []
    copy = Copies._copy

    def counting(self: Copies, matrix: Tensor, memory: int, device: torch.device) -> Tensor:
        before = len(self._made)
        found = copy(self, matrix, memory, device)
        sizes.extend([found.nbytes] * (len(self._made) - before))
        return found

    with patch.object(Copies, "_copy", counting):
        yield sizes


def check_host_memory(device: torch.device) -> None:
    """Read a text with memories kept on the device, then in host memory: the same outputs, and the planned bytes."""
    mixer = {"kind": "memory_caching", "memory": TITANS, "segment": SEGMENT, "combine": "ssc", "top_k": 1}
    text = hidden(CHUNKS * CHUNK + 1).to(device, torch.float32)
    # whole chunks, then one token
    begins = range(0, len(text), CHUNK)
    found = {}
    for kept_on in ("device", "host"):
        layer = built({**mixer, "kept_on": kept_on}).to(device, torch.float32)
        state, outputs, copied = layer.initial_state(ROWS, device, torch.float32), [], []
        with torch.no_grad(), counted() as sizes:
            for begin in begins:
                output, state, _ = layer(text[begin : begin + CHUNK], state, Chunk((begin,) * ROWS))
                outputs.append(output)
                copied.append(sum(sizes))
                sizes.clear()
        found[kept_on] = torch.cat(outputs)
    # the same products of copies; a device may add up a product of fewer memories in another order
    torch.testing.assert_close(found["host"], found["device"], rtol=0, atol=1e-6 if device.type == "cuda" else 0)
    planned = host_memory(model_of({**mixer, "kept_on": "host"}), ROWS, torch.float32, chunks=CHUNKS)
    far = [x for entry in state["kept"] for name, x in entry.items() if name not in ON_DEVICE]
    assert sum(x.nbytes for x in far) == planned.held
    assert all(x.device.type == "cpu" and (x.is_pinned() or device.type == "cpu") for x in far)
    assert all(entry[name].device.type == device.type for entry in state["kept"] for name in ON_DEVICE)
    *_, by_last_chunk, by_token = copied
    # the plan is of the most: queries may select the same memories
    assert 0 < by_last_chunk <= planned.to_device
    assert 0 < by_token <= planned.for_token
