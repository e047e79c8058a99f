"""Held-out loss by the length of the memory: what is read, the figures, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamem.cli.memory_length import chosen_segments
from megamem.config.load import apply_overrides, merge, parse_config, read_yaml
from megamem.config.run import RunConfig
from megamem.data.batch import EvaluationDocument
from megamem.errors import ConfigError, DataError
from megamem.evaluation.memory_length import length_fields, length_table, write_curves
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.training import held_out
from megamem.training.held_out import evaluate_lengths
from tests.unit.evaluation_helpers import CHUNK, CPU, TOLERANCE, VOCABULARY, documents, slow_losses
from tests.unit.test_run_config import config

LENGTHS = (5, 50, 19, 32)
KINDS: dict[str, dict[str, Any]] = {
    "lamemo": {},
    "transformer_xl": {"memory_length": 2 * CHUNK},
    "compressive_transformer": {"memory_length": CHUNK, "compressed_length": 3},
}
"""Mechanisms with a memory that may be read with another length, as trained."""


@dataclass(frozen=True)
class Model:
    """A trained model without a checkpoint: its weights follow from its configuration's names and shapes."""

    config: RunConfig
    title = origin = "runs/tiny"

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        stage = build_stage(self.config.model, PlainLinears())
        initialize_parameters(stage, 1)
        return stage.double().to(device)


def run_config(mixer: dict[str, Any], **model: Any) -> RunConfig:
    shape = {"layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY, "chunk_size": CHUNK}
    tree = {**shape, "init_std": 0.3, "mixer": mixer, **model}
    return config(model=tree, data={"validation": ["held-out"], "sequence_length": CHUNK})


def opener(trained: RunConfig):
    """What opens a model with overrides."""

    def opened(overrides: Sequence[str]) -> Model:
        return Model(parse_config(RunConfig, apply_overrides(trained.model_dump(mode="json"), overrides), "test"))

    return opened


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[EvaluationDocument]:
    """The held-out documents of every run."""
    found = documents(*LENGTHS)
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: found)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_length_has_the_losses_of_a_model_built_with_it(kind: str, texts: list[EvaluationDocument]) -> None:
    """Token by token, by a model that was built with the length and has the same weights."""
    trained = run_config({"kind": kind, **KINDS[kind]})
    (curve,) = evaluate_lengths([opener(trained)], [1, 2, 5], [], torch.float32, CPU)
    assert (curve.mixers, curve.chunk_size, curve.tokens) == ((kind,), CHUNK, sum(LENGTHS))
    assert curve.trained == (KINDS[kind].get("memory_length", CHUNK),)
    assert [(point.segments, point.memory_length) for point in curve.points] == [(1, 8), (2, 16), (5, 40)]
    weights = Model(trained).load().state_dict()
    for point in curve.points:
        longer = {"kind": kind, **KINDS[kind], "memory_length": point.segments * CHUNK}
        stage = Model(run_config(longer)).load()
        stage.load_state_dict(weights)
        wanted = float(np.concatenate([slow_losses(stage, text) for text in texts]).mean())
        assert point.loss == pytest.approx(wanted, rel=TOLERANCE)
        assert point.perplexity == pytest.approx(math.exp(wanted), rel=TOLERANCE)
        # the documents have three bytes and two characters a token
        assert point.bits_per_byte == pytest.approx(wanted / math.log(2) / 3, rel=TOLERANCE)
        assert point.bits_per_character == pytest.approx(wanted / math.log(2) / 2, rel=TOLERANCE)
    assert len({round(point.loss, 4) for point in curve.points}) == 3, "the length matters"


def test_all_models_and_lengths_are_read_alike(
    texts: list[EvaluationDocument], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overrides hold for all models; other held-out tokens are refused before any figure is written."""
    models = [opener(run_config({"kind": kind, **KINDS[kind]})) for kind in ("lamemo", "transformer_xl")]
    bound = ["evaluation.final_max_tokens=64"]
    curves = evaluate_lengths(models, [1, 3], bound, torch.float32, CPU)
    # the first two fit into the bound
    assert [curve.tokens for curve in curves] == [5 + 50] * 2
    answers = iter([texts, documents(*LENGTHS[:3], 33)])
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: next(answers))
    said = r"runs/tiny: its held-out tokens are not those of runs/tiny, or not in the same chunks; models need the"
    with pytest.raises(ConfigError, match=said):
        evaluate_lengths(models, [1], [], torch.float32, CPU)
    # the same tokens in chunks of half the size: as long a memory would be of twice as many
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: texts)
    halves = opener(run_config({"kind": "lamemo"}, chunk_size=CHUNK // 2))
    with pytest.raises(ConfigError, match=said):
        evaluate_lengths([models[0], halves], [1], [], torch.float32, CPU)


@pytest.mark.parametrize("given", [None, 12])
def test_the_trained_length_is_that_of_the_run_s_own_configuration(
    given: int | None, texts: list[EvaluationDocument]
) -> None:
    """Read in shorter chunks than in training, which are the memory's length by default, or with another length."""
    trained = opener(run_config({"kind": "lamemo", "memory_length": given}))
    changes = [f"model.chunk_size={CHUNK // 2}", "model.mixer.memory_length=1"]
    (curve,) = evaluate_lengths([trained], [1, 2, 3], changes, torch.float32, CPU)
    assert (curve.trained, curve.chunk_size) == ((given or CHUNK,), CHUNK // 2)
    assert [point.memory_length for point in curve.points] == [4, 8, 12]
    stage = Model(run_config({"kind": "lamemo", "memory_length": 12}, chunk_size=CHUNK // 2)).load()
    wanted = float(np.concatenate([slow_losses(stage, text) for text in texts]).mean())
    assert curve.points[2].loss == pytest.approx(wanted, rel=TOLERANCE)
    assert list(length_table([curve]).columns[2].cells) == (["4", "8", "12 *"] if given else ["4", "8 *", "12"])


@pytest.mark.parametrize("name", ["lamemo/lamemo-150m", "transformer_xl/transformer-xl-150m"])
def test_the_paper_s_longer_memories_are_read_in_shorter_segments(name: str) -> None:
    """Trained with 150, read with 64 times m: the overrides that docs/mechanisms/lamemo.md gives, and no others."""
    configs = Path("configs")
    trained = merge(read_yaml(configs / "recipes/wikitext103.yaml"), read_yaml(configs / f"models/{name}.yaml"))
    trained = apply_overrides(trained, ["name=tiny", "training.batch_tokens=9600"])
    changes = ["model.chunk_size=64", "data.sequence_length=64"]
    page = Path("docs/mechanisms/lamemo.md").read_text(encoding="utf-8")
    assert " ".join(f"--override {change}" for change in changes) in page
    (field,) = length_fields(parse_config(RunConfig, trained, "test").model, "test").items()
    assert field[1].length == 150
    longest = apply_overrides(trained, [*changes, f"{field[0]}={10 * 64}"])
    (read,) = length_fields(parse_config(RunConfig, longest, "test").model, "test").values()
    assert read == (field[1].kind, 640)


def test_layers_of_their_own_have_fields_of_their_own() -> None:
    memory = [{"layers": [0], "mixer": {"kind": "transformer_xl"}}, {"layers": [1], "mixer": "local_attention"}]
    both = [{"layers": [1], "mixer": {"kind": "lamemo", "memory_length": 3}}]
    for mixer, entries, wanted in (
        ({"kind": "lamemo"}, memory, {"model.memory.0.mixer.memory_length": ("transformer_xl", 8)}),
        ({"kind": "transformer_xl", "memory_length": 0}, both, {
            "model.mixer.memory_length": ("transformer_xl", 0), "model.memory.0.mixer.memory_length": ("lamemo", 3),
        }),
        ({"kind": "transformer_xl"}, [{**both[0], "layers": [0]}], {
            "model.memory.0.mixer.memory_length": ("lamemo", 3), "model.mixer.memory_length": ("transformer_xl", 8),
        }),
    ):  # fmt: skip
        found = length_fields(run_config(mixer, memory=entries).model, "test")
        assert list(found.items()) == list(wanted.items()), "from the lowest layer up"
    with pytest.raises(ConfigError) as refused:
        length_fields(run_config({"kind": "local_attention"}).model, "runs/tiny")
    assert str(refused.value) == (
        "runs/tiny: local_attention has no memory_length to read with; the mixers that have one: "
        "compressive_transformer, lamemo, transformer_xl"
    )


def test_files_and_table(texts: list[EvaluationDocument], tmp_path: Path) -> None:
    curves = evaluate_lengths([opener(run_config({"kind": "lamemo"}))], [1, 2], [], torch.float32, CPU)
    write_curves(tmp_path / "out", curves)
    assert (tmp_path / "out" / "memory_length.png").read_bytes()[:4] == b"\x89PNG"
    (model,) = json.loads((tmp_path / "out" / "memory_length.json").read_text())["models"]
    assert [point["loss"] for point in model["points"]] == [point.loss for point in curves[0].points]
    assert list(length_table(curves).columns[2].cells) == ["8 *", "16"]
    with pytest.raises(DataError, match="exists already; choose another folder"):
        write_curves(tmp_path / "out", curves)


@pytest.mark.parametrize(
    ("text", "wanted"), [("1-4", [1, 2, 3, 4]), ("0", [0]), ("4, 1,2", [1, 2, 4]), ("2-3,3-5", [2, 3, 4, 5])]
)
def test_segments(text: str, wanted: list[int]) -> None:
    assert chosen_segments(text) == wanted


@pytest.mark.parametrize("text", ["", "1-", "-3", "3-1", "1.5", "1-x", "one", "1,,2"])
def test_segments_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--segments {text}: give numbers of chunks, as 1-10 or 1,2,4"):
        chosen_segments(text)
