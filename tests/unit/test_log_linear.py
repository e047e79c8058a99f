"""Log-linear attention: which level holds which segment, and what is the same as what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk
from megamem.memory.composite.levels import Levels
from megamem.ops.linear_recurrence.torch import linear_recurrence
from megamem.ops.linear_recurrence.unrolled import passed, unrolled
from megamem.parallel.linears import PlainLinears, initialize_parameters

MANY = 70


def recursive_weak(t: int, s: int) -> int:
    """The level of the authors' code, one less: the largest power of two within t is cut off the front."""
    level = t.bit_length() - 1
    return level if s < 2**level else recursive_weak(t - 2**level, s - 2**level)


def recursive_strong(t: int, s: int) -> int:
    """The same with strong admissibility: half of that power is cut off, or all of it where as much follows."""
    level = t.bit_length() - 1
    half = 2 ** max(level - 1, 0)
    rest = t - 2**level
    if s < half or (s < 2 * half and rest >= half):
        return level
    cut = half if s < 2 * half else 2 * half
    return recursive_strong(t - cut, s - cut)


def of(levels: Levels, segments: int) -> list[int]:
    """The level of each of so many segments."""
    return levels.of(np.array(segments), np.arange(segments)).tolist() if segments else []


@pytest.mark.parametrize(("admissibility", "recursive"), [("weak", recursive_weak), ("strong", recursive_strong)])
@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_levels_are_those_of_the_recursion(admissibility: str, recursive, count: int) -> None:
    levels = Levels(count, admissibility)
    for n in range(1, MANY):
        found = of(levels, n)
        assert found == [min(recursive(n, i), count - 1) for i in range(n)]
        assert levels.holding(n) == sorted(set(found))
        newest = {level: max(i for i in range(n) if found[i] == level) for level in found}
        assert {level: levels.newest(n, level) for level in newest} == newest


@pytest.mark.parametrize("admissibility", ["weak", "strong"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_carry_moves_whole_levels(admissibility: str, count: int) -> None:
    levels = Levels(count, admissibility)
    for n in range(MANY):
        target = levels.target(n)
        before, after = of(levels, n), of(levels, n + 1)
        moved = [target if admissibility == "weak" else level + 1 for level in before]
        assert after[:-1] == [new if old < target else old for old, new in zip(before, moved, strict=True)]
        assert after[-1] == (target if admissibility == "weak" else 0)


def test_strong_stretches_are_not_longer_than_their_distance() -> None:
    """Weak ones are; each carry of the strong form brings a level half of what it may hold."""
    too_long = {"weak": 0, "strong": 0}
    for admissibility in too_long:
        for n in range(1, MANY):
            found = of(Levels(10, admissibility), n)
            for level in set(found):
                length = max(2 ** (level - 1), 1) if admissibility == "strong" else 2**level
                distance = n - 1 - max(i for i in range(n) if found[i] == level)
                too_long[admissibility] += level > 0 and length > distance
    assert too_long["strong"] == 0 < too_long["weak"]


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_unrolled_recurrences_are_the_recurrence(decays: bool, delta: bool) -> None:
    query, key, value, state = (
        drawn(s, i) for i, s in enumerate([(2, 3, 2, 7, 4), (2, 3, 7, 4), (2, 3, 7, 5), (2, 3, 4, 5)])
    )
    log_decay = -drawn((2, 3, 7), 5).exp() if decays else None
    rate = drawn((2, 3, 7), 6).sigmoid() / 4 if delta else None
    read, after = linear_recurrence(query, key, value, state, log_decay, rate)
    part = unrolled(query, key, log_decay, rate, torch.float64)
    torch.testing.assert_close(part.of_values @ value[:, :, None] + part.of_state @ state[:, :, None], read)
    torch.testing.assert_close(part.writes.mT @ value + passed(part.transition, state), after)
    assert not part.of_values.triu(1).any()
    assert (part.transition is None) is not (decays or delta)


def build(options: object):
    """A mixer in float64, with weights by seed and name."""
    tree = {"layers": 1, "hidden_size": 16, "heads": 4, "vocab_size": 32, "chunk_size": 8, "init_std": 0.3}
    model = parse_config(ModelConfig, {**tree, "mixer": options}, "test")
    mixer = model.mixer.build(model, PlainLinears(), 0).double()
    initialize_parameters(mixer, seed=0)
    return mixer


def mixed(mixer, x: torch.Tensor) -> torch.Tensor:
    """What a mixer makes of x [T, B, 16], read in chunks of 8."""
    state, out = mixer.initial_state(x.shape[1], x.device, x.dtype), []
    for begin in range(0, len(x), 8):
        part, state, _ = mixer(x[begin : begin + 8], state, Chunk((begin,) * x.shape[1]))
        out.append(part)
    return torch.cat(out)


class Ones(torch.nn.Module):
    """Gates of one for each of 4 heads and of so many levels, like `LevelGates`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.new_ones(x.shape[1], 4, len(x), self.count, dtype=dtype)


MEMORIES = [
    {"kind": "retnet"},
    {"kind": "ssd"},
    {"kind": "delta_net"},
    {"kind": "delta_net", "decay": True, "inner_chunk": 3},
]


@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: "-".join(map(str, memory.values())))
@pytest.mark.parametrize("segment", [1, 8])
@pytest.mark.parametrize("admissibility", ["weak", "strong"])
def test_equal_gates_give_the_memory_itself(memory: dict[str, object], segment: int, admissibility: str) -> None:
    """All levels fade as the open memory does: with gates of one they add up to the memory that was never cut."""
    options = {"kind": "log_linear", "memory": memory, "segment": segment, "levels": 3, "closed": "faded"}
    levels, alone = build({**options, "admissibility": admissibility}), build(memory)
    levels.memory.load_state_dict(alone.state_dict())
    levels.level_gates = Ones(4)
    x = drawn((27, 2, 16), 7)
    torch.testing.assert_close(mixed(levels, x), mixed(alone, x))


@pytest.mark.parametrize("memory", [{"kind": "titans", "inner_chunk": 2}, {"kind": "retnet"}], ids=["titans", "retnet"])
def test_what_is_kept_does_not_fade(memory: dict[str, object]) -> None:
    """Both ways agree in the first segment, where nothing is closed, and no further."""
    options = {"kind": "log_linear", "memory": memory, "segment": 4, "levels": 3}
    x = drawn((16, 2, 16), 7)
    kept, faded = (mixed(build({**options, "closed": closed}), x) for closed in ("kept", "faded"))
    torch.testing.assert_close(kept[:4], faded[:4])
    assert (kept[4:] - faded[4:]).abs().amax() > 1e-4


STEPS = {
    "linear": {"memory": {"kind": "linear_attention"}, "segment": 1},
    "retnet, segments of several steps": {"memory": {"kind": "retnet"}, "segment": 8, "levels": 3},
    "ssd, several segments a step": {"memory": {"kind": "ssd"}, "segment": 2, "levels": 4},
    "delta, strong": {"memory": {"kind": "delta_net", "expand_v": 2}, "segment": 1, "admissibility": "strong"},
    "gated delta": {"memory": {"kind": "delta_net", "decay": True}, "segment": 1, "levels": 7},
    "dla, merged": {"memory": {"kind": "dla"}, "segment": 4, "closed": "kept", "levels": 2},
    "titans, merged": {"memory": {"kind": "titans"}, "segment": 4, "closed": "kept"},
    "delta, merged": {"memory": {"kind": "delta_net"}, "segment": 4, "closed": "kept"},
}


@pytest.mark.parametrize("starts", [(0, 0), (16, 16), (8, 28)])
@pytest.mark.parametrize("form", STEPS)
def test_many_steps_at_once_are_one_after_the_other(form: str, starts: tuple[int, int], monkeypatch) -> None:
    """What is read, the state afterwards, and all gradients: 1e-11 of the largest number, float64 in another order."""
    options = {"kind": "log_linear", "levels": 6, "closed": "faded", **STEPS[form]}
    options["memory"] = {**options["memory"], "inner_chunk": 4}
    mixer, tokens = build(options), 24
    x = drawn((tokens, 2, 16), 1)
    # something in every place that holds something by then: what is read before the call's tokens
    before = mixer.initial_state(2, x.device, x.dtype)
    for row, start in enumerate(starts):
        own = mixer.initial_state(1, x.device, x.dtype)
        if start:
            _, own, _ = mixer(drawn((start, 1, 16), 2 + row), own, Chunk((0,)))
        for name, tensor in before.items():
            axis = 1 if name.startswith("before_") else 0
            tensor.narrow(axis, row, 1).copy_(own[name].detach())
    weigh = drawn((tokens, 2, 16), 9)

    def run() -> list[torch.Tensor]:
        """Return what is read, what is left, and the gradients of everything."""
        state = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
        given = x.clone().requires_grad_()
        read, after, _ = mixer(given, state, Chunk(starts))
        total = (read * weigh).sum() + sum((drawn(v.shape, 11) * v).sum() for v in after.values())
        gradients = torch.autograd.grad(
            total, [given, *mixer.parameters(), *state.values()], allow_unused=True, materialize_grads=True
        )
        others, of_state = gradients[: -len(state)], gradients[-len(state) :]
        # what holds nothing yet is zero, whatever its gradient
        held = [gradient * (before[name] != 0) for name, gradient in zip(before, of_state, strict=True)]
        return [each for each in (read, *after.values(), *others, *held) if each.numel()]

    together = run()
    monkeypatch.setattr(type(mixer), "whole_steps", lambda self, chunk, tokens: 0)
    for ours, theirs in zip(together, run(), strict=True):
        assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max().clamp(min=1.0)
