"""Distillation: the divergence against a loop over tokens in float64, the teacher's reading, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.weights import WeightsHeader, write_weights
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import CheckpointError, ConfigError
from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.objective import build_objective
from megamem.model.stage import Stage, build_stage
from megamem.ops import linear_cross_entropy
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.distillation import Teacher, check_teacher, open_teacher
from megamem.pipeline.train_chunk import loss_names
from megamem.pipeline.window import Window
from tests.unit.evaluation_helpers import CHUNK, CPU, VOCABULARY, document, slow_logits
from tests.unit.test_run_config import config

ROWS, WEIGHT = 2, 0.7
SHAPE: dict[str, Any] = {
    "layers": 2, "hidden_size": 16, "heads": 4, "kv_heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY,
    "padded_vocab_size": 40, "chunk_size": CHUNK, "init_std": 0.3,
}  # fmt: skip
MEMORY = {"kind": "added_memory", "memory": {"kind": "delta_net", "decay": True}}


def make(seed: int, **model: Any) -> Stage:
    stage = build_stage(ModelConfig.model_validate({**SHAPE, **model}), PlainLinears())
    initialize_parameters(stage, seed)
    return stage.double()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3 * CHUNK, ROWS), generator=torch.Generator().manual_seed(0))


def places(tokens: Tensor) -> list[Chunk]:
    return [Chunk((begin,) * tokens.shape[1]) for begin in range(0, tokens.shape[0], CHUNK)]


@pytest.mark.parametrize("size", [5 * 4 * VOCABULARY, 2**28], ids=["slices", "whole"])
def test_the_divergence_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch, tokens: Tensor, size: int) -> None:
    """Value and gradients; tokens without a label and rows beyond the vocabulary have no part in it."""
    monkeypatch.setattr(linear_cross_entropy, "SLICE_BYTES", size)
    student, teacher = make(0, mixer=MEMORY), Teacher(make(1, mixer="full_attention"), WEIGHT)
    taught = teacher.read(tokens, places(tokens))
    noise = torch.Generator().manual_seed(2)
    hidden = torch.randn(taught.shape, generator=noise, dtype=torch.float64, requires_grad=True)
    labels = tokens.roll(-1, 0).clone()
    labels[3:7, 0] = labels[-1] = LABEL_IGNORED
    total = hidden.new_zeros(())
    for place in range(len(tokens)):
        for row in range(ROWS):
            if labels[place, row] == LABEL_IGNORED:
                continue
            ours = student.logits(hidden[place : place + 1, row : row + 1])[0, 0, :VOCABULARY].exp()
            theirs = teacher.stage.logits(taught[place : place + 1, row : row + 1])[0, 0, :VOCABULARY].exp().detach()
            for p, q in zip(theirs / theirs.sum(), ours / ours.sum(), strict=True):
                total = total + p * (p.log() - q.log())
    head = student.get_parameter("head.weight")
    wanted = torch.autograd.grad(WEIGHT * total, [hidden, head])
    found = teacher.divergence(student, hidden, taught, labels)
    gradients = torch.autograd.grad(found, [hidden, head])
    # float64: what is left is the order of sums
    torch.testing.assert_close(found, WEIGHT * total, rtol=1e-11, atol=0.0)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert not any(parameter.grad is not None for parameter in teacher.stage.parameters())
    assert float(teacher.divergence(teacher.stage, taught, taught, labels).detach()) == pytest.approx(0.0, abs=1e-12)


def test_the_teacher_reads_whole_sequences() -> None:
    """As token by token with full attention; a document that begins inside sees nothing before it."""
    teacher = Teacher(make(1, mixer="full_attention"), 1.0)
    first, second = document(CHUNK + 3, 0), document(2 * CHUNK - 3, 1)
    texts = [text.tokens[: text.predicted_tokens] for text in (first, second)]
    borders = [((),), ((3,),), ((),)]
    starts = [0, CHUNK, CHUNK - 3]
    chunks = [Chunk((start,), borders=inside) for start, inside in zip(starts, borders, strict=True)]
    hidden = teacher.read(torch.cat(texts)[:, None], chunks)
    found = teacher.stage.logits(hidden)[:, 0]
    wanted = torch.stack([logits for text in (first, second) for _, logits in slow_logits(teacher.stage, text)])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert not hidden.requires_grad


def test_a_window_adds_the_divergence_to_its_loss(tokens: Tensor) -> None:
    run = config(model={**SHAPE, "mixer": MEMORY})
    objective = build_objective(run.training.objective, run.model)
    student, teacher = make(0, mixer=MEMORY), Teacher(make(1, mixer="full_attention"), WEIGHT)
    labels, scale = tokens.roll(-1, 0), torch.tensor(0.01, dtype=torch.float64)
    states = student.initial_states(ROWS, CPU, torch.float64)
    taught = teacher.read(tokens, places(tokens))
    assert loss_names(student, objective, True) == ("next_token", "distillation")
    plain, (loss,), _ = Window(student, objective)(tokens, labels, places(tokens), states, scale)
    total, terms, _ = Window(student, objective, teacher)(tokens, labels, places(tokens), states, scale, 0, taught)
    assert terms[0] == loss
    hidden, own = [], states
    for part, chunk in zip(tokens.split(CHUNK), places(tokens), strict=True):
        out, own, _ = student.read_documents(part, own, chunk)
        hidden.append(out)
    wanted = teacher.divergence(student, torch.cat(hidden), taught, labels)
    torch.testing.assert_close(terms[1], wanted.detach(), rtol=1e-11, atol=0.0)
    torch.testing.assert_close(total, plain + scale * wanted, rtol=1e-11, atol=0.0)
    assert [name for name, _ in Window(student, objective, teacher).named_parameters()] == [
        f"stage.{name}" for name, _ in student.named_parameters()
    ], "the teacher's parameters are nobody's to train"


def test_the_teacher_has_the_weights_of_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Of the base alone, or of a model that has memories beside its attention."""
    student = make(0, mixer=MEMORY).float()
    weights = {name: value.detach() for name, value in student.named_parameters()}
    write_weights(weights, tmp_path / "memory.safetensors", WeightsHeader.of_model(student.config, None))
    base = {name.replace(".attention.", "."): value for name, value in weights.items() if ".mixer.memory." not in name}
    write_weights(base, tmp_path / "base.safetensors", WeightsHeader.of_model(student.config, None))
    full = ModelConfig.model_validate({**SHAPE, "mixer": "full_attention"})
    for file in ("memory", "base"):
        found = open_teacher(tmp_path / f"{file}.safetensors", full.mixer, 1.0, student.config, torch.float32, CPU)
        assert found.stage.config.mixer.kind == "full_attention"
        assert {name: value.sum() for name, value in found.stage.named_parameters()} == {
            name: value.sum() for name, value in base.items()
        }
        assert not any(parameter.requires_grad for parameter in found.stage.parameters())
    del base["layers.1.mlp.up.weight"]
    write_weights(base, tmp_path / "part.safetensors", WeightsHeader.of_model(student.config, None))
    with pytest.raises(CheckpointError, match=r"part.safetensors: layers.1.mlp.up.weight is missing"):
        open_teacher(tmp_path / "part.safetensors", full.mixer, 1.0, student.config, torch.float32, CPU)


def test_a_teacher_is_looked_at_before_the_run(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Its mixer, its file, its shapes and its tokenizer."""
    full = make(0, mixer="full_attention").float()
    weights = {name: value.detach() for name, value in full.named_parameters()}
    write_weights(weights, tmp_path / "full.safetensors", WeightsHeader.of_model(full.config, "a" * 64))

    changed = {"qk_norm", "rope_theta", "heads", "kv_heads", "head_dim"}

    def run(**distill: Any) -> RunConfig:
        """A run with a memory and that teacher."""
        return config(
            model={**SHAPE, "mixer": MEMORY, **{key: distill.pop(key) for key in changed & distill.keys()}},
            training={"distill": {"teacher": str(tmp_path / "full.safetensors"), **distill}},
        )

    check_teacher(config(model={**SHAPE, "mixer": MEMORY}), "b" * 64)
    check_teacher(run(), "a" * 64)
    check_teacher(run(), None)
    with pytest.raises(
        CheckpointError, match=r"full.safetensors: .* the tokenizer aaaaaaaaaaaa, that of data.tokenizer is b"
    ):
        check_teacher(run(), "b" * 64)
    with pytest.raises(CheckpointError, match=r"nothing.safetensors: not a readable safetensors file"):
        check_teacher(run(teacher=str(tmp_path / "nothing.safetensors")), None)
    with pytest.raises(
        CheckpointError, match=r"full.safetensors: was trained with rope_theta 10000.0, model.rope_theta"
    ):
        check_teacher(run(rope_theta=1e6), None)
    with pytest.raises(CheckpointError, match=r"full.safetensors: was trained with heads 4, model.heads is 2"):
        check_teacher(run(heads=2, kv_heads=2, head_dim=8), None)
    check_teacher(run(kv_heads=None), None)  # as many as heads
    with pytest.raises(CheckpointError, match=r"full.safetensors: layers.0.mixer.query_norm.weight is missing"):
        check_teacher(run(qk_norm=True), None)
    with pytest.raises(ConfigError, match=r"^training.distill.mixer.*qk_norm"):
        check_teacher(run(qk_norm=True, mixer="delta_net"), None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"pp": 2}}, "training.distill does not go with parallel.tp 1 and parallel.pp 2"),
        ({"data": {"feeding": "streams", "documents": "join"}}, "does not go with data.feeding streams"),
        ({"training": {"objective": "copy"}}, "does not go with objective copy; use next_token"),
        ({"training": {"distill": {"teacher": "x", "weight": 0}}}, "weight"),
    ],
)
def test_what_has_no_teacher_is_refused(changes: dict[str, Any], said: str) -> None:
    training = {"distill": {"teacher": "x.safetensors"}, **changes.pop("training", {})}
    with pytest.raises(ConfigError, match=said):
        config(model={**SHAPE, "mixer": MEMORY}, training=training, **changes)
