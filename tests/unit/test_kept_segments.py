"""Memory Caching's merged segments, normalized memories and memories in host memory, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.costs.state_bytes import HostMemory, host_memory, model_state_bytes
from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.memory.composite.memory_caching import MemoryCaching
from megamem.memory.composite.segments import SegmentSlice
from megamem.ops.deep_memory.kept import Copies, Rows, selected_answer
from tests.unit.caching_helpers import CHUNK, LINEAR, ROWS, TITANS, built, hidden, model_of

TOKENS, SEGMENT = 64, 4
NORMALIZED = {**LINEAR, "features": "elu", "normalizer": True}
LOGARITHMIC = {"lengths": "logarithmic", "levels": 3}
# sums of the same numbers in another order
EXACT = 1e-10


def caching(memory: dict[str, Any], **options: Any) -> MemoryCaching:
    return built({"kind": "memory_caching", "memory": memory, "segment": SEGMENT, **options})


def outputs(mixer: Any, x: Tensor, calls: int = CHUNK) -> tuple[Tensor, dict[str, Any]]:
    """What it makes of x [TOKENS, ROWS, 16] in calls of so many tokens, and its state after them."""
    state = mixer.initial_state(ROWS, x.device, x.dtype)
    found = []
    for begin in range(0, TOKENS, calls):
        made, state, _ = mixer(x[begin : begin + calls], state, Chunk((begin,) * ROWS))
        found.append(made)
    return torch.cat(found), state


def agree(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


def test_merged_linear_memories_keep_all_that_was_written() -> None:
    """Their sum is the memory of all tokens, whatever was merged."""
    plain, cached = built(LINEAR), caching(LINEAR, combine="residual", **LOGARITHMIC)
    cached.memory.load_state_dict(plain.state_dict())
    agree(outputs(cached, hidden(TOKENS))[0], outputs(plain, hidden(TOKENS))[0])


def test_levels_are_the_binary_digits_of_the_number_of_segments() -> None:
    """After 15 of 16 segments with three levels: 1, 2 and the 12 before them."""
    cached = caching(LINEAR, **LOGARITHMIC)
    config = cached.config
    holding = [config.placed.holding(count) for count in (0, 1, 2, 3, 4, 8, 13)]
    assert holding == [[], [0], [1], [0, 1], [2], [2], [0, 2]]
    assert [config.merged_segments(15, level) for level in range(3)] == [1, 2, 12]
    x = hidden(TOKENS)
    x = x[: 15 * SEGMENT]
    state = cached.initial_state(ROWS, x.device, x.dtype)
    for begin in range(0, len(x), SEGMENT):
        _, state, _ = cached(x[begin : begin + SEGMENT], state, Chunk((begin,) * ROWS))
    kept = cached.kept.readable(state, SegmentSlice(0, 1, (len(x),) * ROWS, SEGMENT, 1))
    inputs, _ = cached.memory.inputs(x, cached.initial_state(ROWS, x.device, x.dtype), Chunk((0,) * ROWS))
    borders = [0, 12 * SEGMENT, 14 * SEGMENT, 15 * SEGMENT]
    assert [int(part.age[0, 0]) for part in kept] == [3, 2, 1]
    for part, begin, end in zip(kept, borders, borders[1:], strict=False):
        key, value = inputs.key[:, :, begin:end], inputs.value[:, :, begin:end]
        agree(part.pools[:, :, 0], key.mean(2))
        agree(part.weights[0][:, :, 0], key.mT @ value)


def test_the_state_of_merged_segments_does_not_grow() -> None:
    model = model_of({"kind": "memory_caching", "memory": LINEAR, "segment": SEGMENT, **LOGARITHMIC})
    sizes = [model_state_bytes(model, 1, torch.float32, context_tokens=CHUNK * chunks)["memory"] for chunks in (1, 9)]
    assert sizes[0] == sizes[1]
    # of 16 segments 0 to 3 levels hold something: the digits of 0 to 15, the third and fourth as one
    config = model.mixer_at(0)
    assert config.summary(model, TOKENS).endswith("a token reads 1.75 of 1.75 kept memories, 100%")


@pytest.mark.parametrize("options", [{}, {"combine": "ssc"}, {"combine": "soup"}, LOGARITHMIC], ids=str)
def test_normalized_memories_answer_with_means_of_values(options: dict[str, Any]) -> None:
    """Where all values are alike every memory answers with them, and so does a layer whose shares sum to one."""
    cached, reads = caching(NORMALIZED, **options), []
    inner = cached.memory.inputs

    def constant(*args: Any) -> Any:
        inputs, after = inner(*args)
        inputs.value.fill_(0.7)
        return inputs, after

    cached.memory.inputs = constant
    cached.memory.finish = lambda read, x, inputs: reads.append(read) or x
    with torch.no_grad():
        outputs(cached, hidden(TOKENS))
    agree(torch.cat(reads, dim=-2), torch.full((ROWS, 2, 2, TOKENS, 4), 0.7, dtype=torch.float64))


def test_the_normalizer_of_one_memory_is_undone_by_the_norm() -> None:
    plain = built({**LINEAR, "features": "elu"})
    normalized = built(NORMALIZED)
    normalized.load_state_dict(plain.state_dict())
    agree(outputs(normalized, hidden(TOKENS))[0], outputs(plain, hidden(TOKENS))[0])


@pytest.mark.parametrize("memory", [NORMALIZED, TITANS], ids=["linear", "titans"])
def test_fetched_memories_answer_the_same(memory: dict[str, Any]) -> None:
    """Bit for bit, as products of copies; gradients add up in another order."""
    found = []
    for kept_on in ("device", "host"):
        x = hidden(TOKENS).requires_grad_()
        mixer = caching(memory, combine="ssc", top_k=1, kept_on=kept_on)
        made, state = outputs(mixer, x)
        (gradient,) = torch.autograd.grad(made.square().sum(), x)
        found.append((gradient, made, *state["kept"][0].values()))
    (gradient, *others), (theirs, *fetched) = found
    agree(gradient, theirs)
    assert all(torch.equal(device, host) for device, host in zip(others, fetched, strict=True))


def test_only_what_is_read_is_fetched() -> None:
    """Of far lists of two, three and one memories the second, the first and third, and none; of a near one all."""
    kept = [(torch.arange(float(2 * n)).view(1, 1, n, 1, 2) + 10 * n,) for n in (2, 3, 1, 2)]
    rows = Rows([torch.tensor(counts) for counts in ([0, 2], [1, 0, 4], [0], [0, 3])])
    copies = Copies()
    (made,), read = copies.fetched(kept, rows, (True, True, True, False), torch.device("cpu"))
    numbers = [[22.0, 23.0], [30.0, 31.0, 34.0, 35.0], [20.0, 21.0, 22.0, 23.0]]
    assert [part.flatten().tolist() for part in made] == numbers
    assert read.on_host == [[2], [1, 4], [0, 3]]
    assert [part.tolist() for part in read.counts] == read.on_host
    x = torch.ones(10, 1)
    assert torch.equal(read.times(x, made), read.padded(x, made))


def test_a_memory_is_copied_once_a_call() -> None:
    kept, copied = [(torch.randn(1, 1, 3, 1, 2),)], []

    class Counting(Copies):
        def _copy(self, matrix: Tensor, memory: int, device: torch.device) -> Tensor:
            before = len(self._made)
            found = super()._copy(matrix, memory, device)
            copied.extend([memory] * (len(self._made) - before))
            return found

    copies = Counting()
    for counts in ([1, 0, 2], [1, 1, 0]):
        copies.fetched(kept, Rows([torch.tensor(counts)]), (True,), torch.device("cpu"))
    assert copied == [0, 2, 1]


def test_nothing_is_fetched_where_nothing_is_selected() -> None:
    query, shares = torch.ones(1, 1, 1, 3, 2), torch.zeros(1, 1, 1, 3, 4)
    kept = [(torch.full((1, 1, 4, 2, 5), torch.nan),)]

    def answer(x: Tensor, matrices: Any, rows: Rows) -> Tensor:
        return rows.times(x, matrices[0])

    found = selected_answer(answer, query, kept, [shares], 5, Copies(), (True,))
    assert torch.equal(found, torch.zeros(1, 1, 1, 3, 5))


def test_bytes_in_host_memory_and_of_copies() -> None:
    """Two layers, three rows, five chunks of four segments: 20 memories of two heads, 4 x 5 numbers of 4 bytes each."""
    mixer = {"kind": "memory_caching", "memory": NORMALIZED, "segment": SEGMENT, "combine": "ssc", "top_k": 1}
    model, memory = model_of({**mixer, "kept_on": "host"}, layers=2), 4 * 5 * 4
    found = host_memory(model, 3, torch.bfloat16, chunks=5)
    # a chunk's 16 tokens of 4 heads select all of the 32 before it at most, one token 4 of 40
    assert found == HostMemory(
        held=2 * 3 * 40 * memory,
        to_device=2 * 3 * 32 * memory,
        to_host=2 * 3 * 8 * memory,
        for_token=2 * 3 * 4 * memory,
    )
    halved = host_memory(model, 3, torch.bfloat16, tp_size=2, chunks=5)
    assert (halved.held, halved.for_token) == (found.held // 2, found.for_token // 2)
    assert host_memory(model, 1, torch.bfloat16, chunks=1).to_device == 0
    # two past chunks are kept: 16 memories
    bounded = model_of({**mixer, "kept_on": "host", "max_chunks": 2, "top_k": 99})
    found = host_memory(bounded, 1, torch.bfloat16, chunks=5)
    assert (found.held, found.for_token) == (16 * memory, 16 * memory)
    assert host_memory(model_of(mixer), 1, torch.bfloat16, chunks=5) == HostMemory(0, 0, 0, 0)


def test_normalized_levels_of_log_linear_attention_are_kept_as_they_were() -> None:
    """One product of all that fades has no sum for each level."""
    mixer = {"kind": "log_linear", "memory": NORMALIZED, "segment": SEGMENT}
    assert outputs(built(mixer), hidden(TOKENS))[0].isfinite().all()
    with pytest.raises(ConfigError, match="closed faded reads all levels in one product, normalizer true divides each"):
        model_of({**mixer, "closed": "faded"})


def test_a_normalized_level_that_holds_nothing_answers_nothing_however_large_its_gate() -> None:
    """Its sum of weights is zero: gates over the smallest of numbers would be infinite, and times zero no numbers."""
    mixer = built({"kind": "log_linear", "memory": NORMALIZED, "segment": SEGMENT})
    with torch.no_grad():
        mixer.level_gates.factor.mul_(100)
    x = hidden(4 * SEGMENT)
    # where levels would hold something, had the document been read from its start
    place = Chunk((2 * SEGMENT,) * ROWS)
    output, _, _ = mixer(x, mixer.initial_state(ROWS, x.device, x.dtype), place)
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("memory", "options", "message"),
    [
        (LINEAR, {**LOGARITHMIC, "max_chunks": 2}, "max_chunks 2 is for lengths: constant"),
        (
            "delta_net",
            LOGARITHMIC,
            "memory delta_net of two segments cannot be merged; .* write: continued, or one of dla",
        ),
        (LINEAR, {"levels": 0}, "levels"),
        (LINEAR, {"lengths": "doubling"}, "lengths"),
        (LINEAR, {"kept_on": "host"}, "kept_on host is for combine ssc, which selects; grm reads every kept memory"),
        (LINEAR, {**LOGARITHMIC, "kept_on": "host", "combine": "ssc"}, "kept_on host is for lengths: constant"),
        ({**LINEAR, "normalizer": True}, {}, "normalizer true divides by a sum of weights, .* identity .* use elu"),
        (NORMALIZED, {"combine": "soup", "gate": "raw"}, "gate raw may be negative"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(memory: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of({"kind": "memory_caching", "memory": memory, "segment": SEGMENT, **options})


@pytest.mark.parametrize("segment", [SEGMENT, CHUNK])
def test_what_is_kept_is_no_part_of_something_larger(segment: int) -> None:
    """Sums of keys are the last of a chunk's running sums, matrices may be transposed: both are copied once."""
    mixer = built(
        {"kind": "memory_caching", "memory": {"kind": "dla", "inner_chunk": 4}, "segment": segment, "pooling": "sum"}
    )
    state = mixer.initial_state(ROWS, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        _, state, _ = mixer(hidden(CHUNK), state, Chunk((0,) * ROWS))
    (kept,) = state["kept"]
    for name, tensor in kept.items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
