"""Next tokens and copies together: gradients by the equation, what is counted, costs, held-out figures, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamem.config.load import merge, parse_config
from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED, Batch
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.run import final_evaluation
from megamem.memory.base import Chunk
from megamem.model.objective import build_objective
from megamem.model.objectives.copy import Copy
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline import base
from megamem.pipeline.comparison import compare_for
from megamem.pipeline.engine import WindowEngine
from megamem.pipeline.gradient_sums import GradientSums
from megamem.pipeline.window import Window
from megamem.planning.arithmetic import describe
from megamem.planning.machines import machine
from megamem.planning.plan import make_plan
from megamem.training import build
from megamem.training.phases import training_flops
from tests.unit.evaluation_helpers import CHUNK, CPU, VOCABULARY, document

LENGTH, ROWS = 4 * CHUNK, 4
WEIGHT = 0.8125
"""13/16. Of 32 positions 13 are copied tokens: sums of copies are multiplied by 13/16 * 32/13 = 2, so that float32 has
the factors of the losses exactly."""
DELIMITER = {"token": 31, "count": 3}
COMBINED = {"kind": "combined", "copies": {"kind": "copy", "delimiter": DELIMITER}, "copy_weight": WEIGHT}
TREE: dict[str, Any] = {
    "name": "case",
    "model": {
        "layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY, "chunk_size": CHUNK,
        "init_std": 0.3, "mixer": "full_attention",
    },
    "data": {"sources": "none", "sequence_length": LENGTH},
    "training": {
        "steps": 10, "batch_tokens": ROWS * LENGTH, "micro_batch_size": 2, "precision": "fp32", "objective": COMBINED,
    },
    "parallel": {"zero_stage": 0},
}  # fmt: skip


def config(**sections: Any) -> RunConfig:
    return parse_config(RunConfig, merge(TREE, sections), "file")


def plain(run: RunConfig, objective: Any = "next_token") -> RunConfig:
    """The same run with another objective."""
    return config(**merge(run.model_dump(mode="json", exclude={"training"}), {"training": {"objective": objective}}))


def batches(run: RunConfig) -> list[Batch]:
    """The micro-batches of a step, whose labels are the next tokens."""
    rows = run.training.micro_batch_size
    starts = np.arange(0, LENGTH, CHUNK)[:, None].repeat(rows, 1)
    made = []
    for index in range(run.accumulation_steps(1)):
        ids = torch.randint(VOCABULARY - 1, (LENGTH + 1, rows), generator=torch.Generator().manual_seed(index))
        made.append(Batch(ids[:-1], ids[1:], starts, tuple(range(rows))))
    return made


class PlainDeepSpeed:
    """DeepSpeed's engine as far as forward and backward of a step go."""

    def __init__(self, window: Window, backwards: int) -> None:
        self.window, self.backwards = window, backwards

    def __call__(self, *arguments: Any) -> Any:
        return self.window(*arguments)

    def backward(self, loss: Tensor) -> None:
        (loss / self.backwards).backward()

    def step(self) -> None:
        """Count nothing."""


def engine(run: RunConfig, dp_size: int = 1, dp_rank: int = 0) -> WindowEngine:
    """An engine in float64, without processes and without an optimizer."""
    made = WindowEngine.__new__(WindowEngine)
    made.config, made.dtype = run, torch.float64
    made.topology = SimpleNamespace(dp_size=dp_size, dp_rank=dp_rank, dp_group=None, device=CPU)  # type: ignore[assignment]
    made.stage = build_stage(run.model, PlainLinears())
    initialize_parameters(made.stage, 1)
    made.stage.double()
    made.objective = build_objective(run.training.objective, run.model)
    made.accumulation, made.carried, made.steps_before = run.accumulation_steps(dp_size), {}, 0
    made.engine = PlainDeepSpeed(made.module(), made.backwards())  # type: ignore[arg-type,assignment]
    made.sums = GradientSums(made.engine)
    return made


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, in which a sum over ranks is what there is."""
    monkeypatch.setattr(base.dist, "all_reduce", lambda tensor, **_: tensor)


def mean_nats(stage: Stage, read: list[list[int]], predicted: list[list[int]]) -> Tensor:
    """Nats per predicted token of rows, each read by itself, and the layers' own losses as much per token."""
    total, count, own = torch.zeros((), dtype=torch.float64), 0, torch.zeros((), dtype=torch.float64)
    for inputs, labels in zip(read, predicted, strict=True):
        states = stage.initial_states(1, CPU, torch.float64)
        for begin in range(0, LENGTH, CHUNK):
            tokens = torch.tensor(inputs[begin : begin + CHUNK])[:, None]
            hidden, states, auxiliary = stage(tokens, states, Chunk((begin,)))
            logits = stage.logits(hidden)[:, 0]
            own = own + sum(value * CHUNK for value in auxiliary.values())
            for place, label in enumerate(labels[begin : begin + CHUNK]):
                if label != IGNORED:
                    total = total - (logits[place, label] - logits[place].exp().sum().log())
                    count += 1
    return (total + own) / count


def by_equation(stage: Stage, texts: list[Batch]) -> Tensor:
    """L = L_next_token + w L_copy, of rows that are written out."""
    rows = [
        (row, label)
        for text in texts
        for row, label in zip(text.tokens.T.tolist(), text.labels.T.tolist(), strict=True)
    ]
    half, marks = LENGTH // 2, [DELIMITER["token"]] * DELIMITER["count"]
    kept, nothing = half - len(marks), [IGNORED]
    copies = [row[:half] + marks + row[:kept] for row, _ in rows]
    asked = [nothing * (half + len(marks) - 1) + row[:kept] + nothing for row, _ in rows]
    next_token = mean_nats(stage, [row for row, _ in rows], [label for _, label in rows])
    return next_token + WEIGHT * mean_nats(stage, copies, asked)


def gradients(stage: Stage) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in stage.named_parameters() if parameter.grad is not None}


# an architecture with a memory between chunks; layers with losses of their own; attention
MODELS: dict[str, dict[str, Any]] = {
    "attention": {},
    "own-losses": {"mixer": {"kind": "compressive_transformer", "ratio": 4}},
    "memory-model": {
        "mixer": "local_attention",
        "architecture": {"kind": "memory_model", "encoder": {"layers": 1}, "slots": 3},
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_losses_of_a_step_are_those_of_the_equation(model: str) -> None:
    """Micro-batches and readings together have one autograd graph's gradients; 1e-12: float64 sums in another order."""
    run = config(model=MODELS[model])
    own, texts = engine(run), batches(run)
    micro_batches, predicted, tokens = own._read(texts)
    losses, _ = own.backward(micro_batches, predicted)
    found = gradients(own.stage)
    own.stage.zero_grad()
    loss = by_equation(own.stage, texts)
    loss.backward()
    expected = gradients(own.stage)
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        assert (found[name] - exact).norm() <= 1e-12 * exact.norm(), name
    # the sum of what is reported is what is trained on, per token of the first reading
    assert float(losses.sum() / predicted) == pytest.approx(loss.item(), rel=1e-12)
    assert own.loss_names[:2] == ("next_token", "copy")
    assert (int(predicted), int(tokens)) == (ROWS * LENGTH, ROWS * LENGTH), "each text counts once"


def test_reported_losses_are_means_over_their_own_tokens() -> None:
    """The first one as it is without the other, the copies' times its weight."""
    run = config()
    texts, found = batches(run), {}
    for name, own_run in {"both": run, "next_token": plain(run), "copy": plain(run, COMBINED["copies"])}.items():
        own = engine(own_run)
        micro_batches, predicted, _ = own._read(texts)
        losses, _ = own.backward(micro_batches, predicted)
        found[name] = (losses / predicted).tolist()
    assert found["both"] == pytest.approx([*found["next_token"], WEIGHT * found["copy"][0]], rel=1e-12)


def test_readings_drop_other_values_whatever_the_layout() -> None:
    """Rows of the second reading are numbered behind those of the first, which has the numbers of a plain run."""
    run = config(model={"dropout": 0.1})
    alone, plainly = engine(run), engine(plain(run))

    def keys(own: WindowEngine) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for micro_batch in own._read(batches(run)[: own.accumulation])[0]:
            dropout = micro_batch.places[0].dropout
            assert dropout is not None
            found.setdefault(micro_batch.reading, []).extend(dropout.rows)
        return found

    first, second = keys(alone).values()
    assert len({*first, *second}) == 2 * ROWS
    assert keys(plainly) == {0: first}
    halves = [keys(engine(run, 2, rank)) for rank in range(2)]
    assert [[*halves[0][reading], *halves[1][reading]] for reading in range(2)] == [first, second]


# costs


def test_a_step_goes_through_twice_as_many_micro_batches() -> None:
    run = config(parallel={"pp": 2, "dp": 1})
    other = plain(run)
    assert (run.accumulation_steps(1), run.micro_batches(1), other.micro_batches(1)) == (2, 4, 2)
    assert (compare_for(run).micro_batches, compare_for(other).micro_batches) == (4, 2)
    assert len(build_objective(run.training.objective, run.model).readings) == run.training.objective.readings == 2
    assert engine(config()).backwards() == 2 * engine(plain(config())).backwards() == 4


def test_operations_and_times_count_both_readings() -> None:
    run = config()
    other = plain(run)
    assert training_flops(run) == [2 * flops for flops in training_flops(other)]
    card = machine("h100", 8)
    both, one = (make_plan(of, 1, card) for of in (run, other))
    assert both.time.compute.total == pytest.approx(2 * one.time.compute.total)
    assert both.time.update == one.time.update
    assert both.tokens_per_second < one.tokens_per_second
    assert both.mfu * both.time.total == pytest.approx(2 * one.mfu * one.time.total)
    assert [rank.total for rank in both.ranks] == [rank.total for rank in one.ranks], "no more bytes"
    sent, sent_once = (make_plan(staged(of), 2, card).traffic[0].pipeline for of in (run, other))
    assert sent == 2 * sent_once > 0
    lines = describe(run, 1)
    assert any("2 micro-batches x 2 rows, read 2 times (combined)" in line for line in lines)
    assert any(line.endswith("4 backward passes a step") for line in lines)
    assert describe(other, 1)[1].endswith("2 micro-batches x 2 rows")


def staged(run: RunConfig) -> RunConfig:
    """The same run in two stages."""
    return RunConfig.model_validate({**run.model_dump(mode="json"), "parallel": {"pp": 2, "zero_stage": 0}})


# held-out text


def test_both_are_measured_on_held_out_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own figures are of plain text; those of copies are what evaluation under `copy` finds."""
    run = config(data={"validation": ["held out"]})
    texts = [document(100, 1), document(40, 2)]
    stage = engine(run).stage
    evaluator = Evaluator(stage, rows=ROWS)
    both = final_evaluation(evaluator, lambda: texts, None, run).figures()
    once = final_evaluation(evaluator, lambda: texts, None, plain(run)).figures()
    copied = final_evaluation(evaluator, lambda: texts, None, plain(run, COMBINED["copies"])).figures()
    assert both["val_loss"] == once["val_loss"]
    assert both["val_accuracy"] == once["val_accuracy"]
    assert both["sliding_perplexity"] == once["sliding_perplexity"] is not None
    assert (both["val_copy_loss"], both["val_copy_accuracy"]) == (copied["val_loss"], copied["val_accuracy"])
    assert both["val_copy_loss"] != both["val_loss"]
    assert "val_copy_loss" not in once

    monkeypatch.setattr(build, "held_out_documents", lambda _: texts)
    monkeypatch.setattr(build, "Evaluator", lambda stage, topology, rows: Evaluator(stage, rows=rows))
    validation = build.build_validation(engine(run), [], lambda _: None)
    assert validation is not None
    record = validation.evaluate()
    assert {name: record[name] for name in ("val_loss", "val_copy_loss", "val_copy_accuracy")} == {
        name: both[name] for name in ("val_loss", "val_copy_loss", "val_copy_accuracy")
    }


REFUSALS = {
    "no copy": (
        {"copies": "next_token"}, ["training.objective.copies: next_token does not copy", "use copy or blank_copy"],
    ),
    "no weight": ({"copy_weight": 0}, ["training.objective.copy_weight", "greater than 0", "got 0"]),
    "an unknown key": (
        {"copies": {"kind": "blank_copy", "blank_tokne": 1}},
        ["training.objective.copies.blank_tokne: unknown key; did you mean 'blank_token'?"],
    ),
    "a blank beyond the vocabulary": (
        {"copies": {"kind": "blank_copy", "blank_token": 32}}, ["blank_copy's blank_token 32", "model.vocab_size 32"],
    ),
    "a delimiter beyond the vocabulary": (
        {"copies": {"kind": "copy", "delimiter": {"token": 40}}}, ["copy's delimiter.token 40", "model.vocab_size 32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    objective, words = REFUSALS[name]
    with pytest.raises(ConfigError) as error:
        config(training={"objective": {**COMBINED, **objective}})
    message = str(error.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message


def test_data_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.documents pad does not go with training\.objective copy"):
        config(data={"documents": "pad"})
    with pytest.raises(ConfigError, match=r"half is no whole number of chunks, as training\.objective copy needs"):
        config(data={"sequence_length": 3 * CHUNK}, training={"batch_tokens": 6 * CHUNK})


def test_defaults_are_the_paper_s() -> None:
    run = config(training={"objective": "combined"})
    objective = build_objective(run.training.objective, run.model)
    (first, one), (second, weight) = objective.readings
    assert first is objective
    assert isinstance(second, Copy)
    assert (first.names, second.names, one, weight) == (("next_token",), ("copy",), 1.0, 1.0)
    assert second.delimiter is None
