"""Memory models beyond the laws: slots, positions, the control, gradients that reach the encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, States, detach
from megamem.model.architectures.memory_model import MemoryModel
from megamem.model.memory_writer import filled_slots, with_memories
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.window import Window

CHUNK, SLOTS, ROWS = 8, 3, 2
CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 16, "heads": 4, "ffn_size": 24, "vocab_size": 32, "chunk_size": CHUNK, "init_std": 0.3, "layers": 4,
}  # fmt: skip
ENCODER = {"layers": 2, "hidden_size": 12, "heads": 3}


def model(**options: Any) -> ModelConfig:
    architecture = {"kind": "memory_model", "slots": SLOTS, "encoder": ENCODER, **options}
    layers = SHAPE["layers"] - (0 if architecture["encoder"] else ENCODER["layers"])
    return ModelConfig.model_validate({**SHAPE, "layers": layers, "architecture": architecture})


def built(config: ModelConfig) -> MemoryModel:
    stage = build_stage(config, PlainLinears())
    initialize_parameters(stage, 1)
    assert isinstance(stage, MemoryModel)
    return stage.double()


def read(stage: MemoryModel, ids: Tensor) -> tuple[Tensor, States]:
    """Hidden states of all tokens [tokens, batch, width], chunk by chunk, and the states behind them."""
    states, outputs = stage.initial_states(ids.shape[1], CPU, torch.float64), []
    for begin in range(0, len(ids), CHUNK):
        output, states, _ = stage(ids[begin : begin + CHUNK], states, Chunk((begin,) * ids.shape[1]))
        outputs.append(output)
    return torch.cat(outputs), states


def ids(tokens: int, rows: int = ROWS) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (tokens, rows), generator=torch.Generator().manual_seed(3))


def without_encoder(stage: MemoryModel) -> MemoryModel:
    """The control with the decoder's weights of `stage`."""
    control = built(model(encoder=None, **stage.settings.model_dump(include={"fill", "positions"})))
    weights = {}
    for name, value in stage.state_dict().items():
        part, _, rest = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            weights[name] = value
        elif int(part) >= ENCODER["layers"]:
            weights[f"layers.{int(part) - ENCODER['layers']}.{rest}"] = value
    del weights["encoder_embedding.weight"]
    control.load_state_dict(weights)
    return control


def test_fixed_and_variable_positions_agree_where_all_slots_are_full_and_nowhere_else() -> None:
    fixed, variable = built(model()), built(model(positions="variable"))
    variable.load_state_dict(fixed.state_dict())
    x = ids(CHUNK * (SLOTS + 3))
    ours, theirs = read(fixed, x)[0], read(variable, x)[0]
    full = SLOTS * CHUNK
    # sums over fewer rows, in another order
    assert (ours[full:] - theirs[full:]).abs().max() < 1e-12
    for chunk in range(SLOTS):
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        assert (ours[part] - theirs[part]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("positions", ["fixed", "variable"])
@pytest.mark.parametrize("fill", ["ones", "zeros"])
def test_the_control_is_a_model_whose_memories_are_what_fills_empty_slots(
    fill: str, positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: the same operations on the same numbers."""
    stage = built(model(fill=fill, positions=positions))
    x = ids(CHUNK * (SLOTS + 2))
    remembering, _ = read(stage, x)
    control, states = read(without_encoder(stage), x)
    assert set(states) == {"layers.0", "layers.1"}
    # nothing is remembered in the first chunk
    assert torch.equal(remembering[:CHUNK], control[:CHUNK])
    assert (remembering[CHUNK:] - control[CHUNK:]).abs().amax((1, 2)).min() > 1e-3
    writer = stage.layers[str(ENCODER["layers"] - 1)].get_submodule("writer")
    value = 1.0 if fill == "ones" else 0.0
    monkeypatch.setattr(type(writer), "memories", lambda _, x: x.new_full((1, x.shape[1], SHAPE["hidden_size"]), value))
    assert torch.equal(read(stage, x)[0], control)


def test_a_token_is_read_in_later_chunks_through_memories_alone() -> None:
    """Forgetting the oldest memory forgets its chunk; what a chunk reads of another is a function of the slots."""
    stage = built(model())
    x = ids(CHUNK * (SLOTS + 3))
    other = x.clone()
    other[2] = (other[2] + 1) % SHAPE["vocab_size"]
    (one, states), (two, others) = read(stage, x), read(stage, other)
    changed = [(one - two)[c * CHUNK : (c + 1) * CHUNK].abs().max().item() for c in range(SLOTS + 3)]
    assert all(difference > 1e-3 for difference in changed[: SLOTS + 1])
    assert changed[SLOTS + 1 :] == [0.0, 0.0]
    assert torch.equal(states["memories"]["memories"], others["memories"]["memories"])


@pytest.mark.parametrize("window", [1, 2, 3])
def test_gradients_reach_the_encoder_through_memories_inside_the_window(window: int) -> None:
    """The memory of a window's last chunk is read by nobody in it."""
    stage = built(model())
    x, states = ids(3 * CHUNK), stage.initial_states(ROWS, CPU, torch.float64)
    for chunk in range(3):
        states = detach(states) if chunk % window == 0 else states
        hidden, states, _ = stage(x[chunk * CHUNK : (chunk + 1) * CHUNK], states, Chunk((chunk * CHUNK,) * ROWS))
        stage.token_losses(hidden, x[:CHUNK]).sum().backward(retain_graph=True)
    found = {name for name, parameter in stage.named_parameters() if parameter.grad is not None}
    encoder = {name for name, _ in stage.named_parameters() if name.startswith(("layers.0.", "layers.1.", "encoder_"))}
    assert encoder & found == (encoder if window > 1 else set())


def test_memories_are_of_the_last_tokens_of_equal_parts() -> None:
    """With causal layers the first of two memories does not know the chunk's second half."""
    stage = built(model(memories_per_chunk=2))
    x = ids(CHUNK)
    other = x.clone()
    other[CHUNK // 2] = (other[CHUNK // 2] + 1) % SHAPE["vocab_size"]
    one, two = (read(stage, each)[1]["memories"]["memories"] for each in (x, other))
    assert one.shape == (2 * SLOTS, ROWS, SHAPE["hidden_size"])
    assert torch.equal(one[0], two[0])
    assert (one[1] - two[1]).abs().amax(-1).min() > 1e-3


def test_compressed_memories_have_the_rank_of_their_width() -> None:
    stage = built(model(compressed_size=2))
    memories = [read(stage, ids(CHUNK, rows=12) + 0)[1]["memories"]["memories"][0]]
    assert torch.linalg.matrix_rank(memories[0], rtol=1e-10) == 2


@pytest.mark.parametrize("memories", [1, 2])
def test_chunks_of_a_window_are_encoded_side_by_side(memories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One reading of the encoder for all of them, with the loss and gradients of one reading for each."""
    stage, chunks = built(model(memories_per_chunk=memories)), SLOTS + 2
    window = Window(stage, NextToken(stage.config))
    x = ids(chunks * CHUNK + 1)
    places = [Chunk((chunk * CHUNK, max(chunk - 1, 0) * CHUNK)) for chunk in range(chunks)]
    mixer, read_by_encoder = stage.layer(0).mixer, []
    forward = mixer.forward
    monkeypatch.setattr(mixer, "forward", lambda x, *rest: read_by_encoder.append(x) or forward(x, *rest))

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        stage.zero_grad()
        states, scale = stage.initial_states(ROWS, CPU, torch.float64), torch.tensor(0.1, dtype=torch.float64)
        loss, _, _ = window(x[:-1], x[1:], places, states, scale)
        loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in stage.named_parameters()}

    loss, gradients = run()
    assert [tuple(each.shape[:2]) for each in read_by_encoder] == [(CHUNK, chunks * ROWS)]
    monkeypatch.setattr(stage, "prepare", lambda tokens, places: places)
    alone, expected = run()
    assert len(read_by_encoder) == 1 + chunks
    # sums in another order
    assert abs(loss - alone) < 1e-12
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 1e-12


@pytest.mark.parametrize("count", [1, 2])
def test_slots_by_a_loop_over_rows(count: int) -> None:
    """Rows that have filled other numbers of slots, some of them all."""
    memories, written = torch.randn(SLOTS * count, 4, 5), torch.randn(count, 4, 5)
    for finished in ((0, 1, 2, 3), (2, 2, 2, 2), (3, 3, 3, 3), (0, 0, 0, 0)):
        seen, kept = filled_slots(memories, finished, count, 1.0), with_memories(memories, written, finished)
        for row, behind in enumerate(finished):
            own = memories[: behind * count, row]
            assert torch.equal(seen[:, row], torch.cat((own, torch.ones(SLOTS * count - len(own), 5))))
            after = torch.cat((own, written[:, row]))[-SLOTS * count :]
            assert torch.equal(kept[: len(after), row], after)
            assert torch.equal(kept[len(after) :, row], memories[len(after) :, row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"training": {"bptt_chunks": 1}},
            "training.bptt_chunks 1 leaves parameters of memory_model without gradients",
        ),
        (
            {"data": {"sequence_length": 5 * CHUNK}, "training": {"batch_tokens": 10 * CHUNK}},
            "architecture.slots 3 cannot hold the memories of all 4 chunks before the last of a sequence of 5 "
            r"\(data.sequence_length 40\): use 4 slots, or drop the oldest ones with architecture.overflow drop_oldest",
        ),
        (
            {"data": {"feeding": "streams"}},
            "data.feeding streams reads documents of any number of chunks, and architecture.slots 3 hold the memories "
            "of so many: use sequences, or drop the oldest ones with architecture.overflow drop_oldest",
        ),
        ({"parallel": {"tp": 2}}, "model.architecture.encoder.heads 3 is not divisible by parallel.tp 2"),
        (
            {"model": {"architecture": {"kind": "memory_model", "slots": 2, "positions": "variable"}},
             "parallel": {"tp": 2, "sequence_parallel": True}},
            "parallel.sequence_parallel does not go with architecture.positions variable",
        ),
        (
            {"model": {"architecture": {"kind": "memory_model", "slots": 2, "positions": "variable"}},
             "parallel": {"zero_stage": 3}},
            "parallel.zero_stage 3 does not go with architecture.positions variable",
        ),
    ],
)  # fmt: skip
def test_runs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_of(change)


@pytest.mark.parametrize(
    ("options", "feeding"),
    [
        ({"slots": 3}, "sequences"),
        ({"slots": 1, "overflow": "drop_oldest"}, "sequences"),
        ({"slots": 1, "overflow": "drop_oldest"}, "streams"),
        ({"slots": 1, "encoder": None}, "streams"),
    ],
)
def test_sequences_of_four_chunks_are_trained_on(options: dict[str, Any], feeding: str) -> None:
    """With a slot for each chunk but the last, where the oldest may be dropped, or where there are no memories."""
    architecture = {"kind": "memory_model", "encoder": ENCODER, **options}
    assert run_of({"model": {"architecture": architecture}, "data": {"feeding": feeding}}).chunks == 4


def run_of(change: dict[str, Any]) -> RunConfig:
    """A run on sequences of four chunks, with other values in some sections."""
    tree = {
        "name": "test",
        "model": {**SHAPE, "architecture": {"kind": "memory_model", "slots": 3, "encoder": ENCODER}},
        "data": {"sources": "none", "sequence_length": 4 * CHUNK},
        "training": {"steps": 1, "batch_tokens": 8 * CHUNK, "micro_batch_size": 1, "precision": "fp32"},
    }
    merged = {
        name: {**value, **change.get(name, {})} if isinstance(value, dict) else value for name, value in tree.items()
    }
    merged |= {name: value for name, value in change.items() if name not in tree}
    return parse_config(RunConfig, merged, "test")
