"""Another memory than in training: taken away at every chunk, or of another length with the same weights."""

import pytest
import torch

from checkpoints import whole
from checkpoints.whole import whole_model
from megamem.config.evaluation import EvaluationConfig
from megamem.config.model import ModelConfig
from megamem.errors import CheckpointError, ConfigError, ConversionError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.run import final_evaluation
from megamem.hf.configuration import MegamemConfig
from megamem.hf.held_out import open_exported
from megamem.hf.modeling import MegamemForCausalLM
from megamem.hf.trained import is_exported, open_trained
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.training.held_out import evaluate_run
from tests.contract.cases import CASES
from tests.unit.evaluation_helpers import CHUNK, CPU, ROWS, TOLERANCE, VOCABULARY, documents, slow_losses
from tests.unit.test_run_config import config

EVERY_KIND = {case.kind: case for case in reversed(CASES)}
"""Each mechanism and architecture once."""
LENGTHS = (5, 50, 19, 32)
OLD = {"basis": 8, "widths": [0.1, 0.2], "samples": 8}
SHORT, LONG = CHUNK, 2 * CHUNK
REMEMBERING = {
    "transformer_xl": ({"memory_length": SHORT}, {"memory_length": LONG}),
    "compressive_transformer": ({"memory_length": SHORT, "compressed_length": 3}, {"memory_length": LONG}),
    "infinity_former": ({**OLD, "short_memory": SHORT}, {"short_memory": LONG}),
    "lamemo": ({"memory_length": SHORT}, {"memory_length": LONG}),
}
"""Mechanisms with a memory of tokens as they are: options in training, and what an evaluation changes of them."""


def stage_of(model: ModelConfig):
    stage = build_stage(model, PlainLinears())
    initialize_parameters(stage, 1)
    return stage


def remembering(kind: str, **changes: object) -> ModelConfig:
    """Two layers of a mechanism, with large weights."""
    mixer = {"kind": kind, **REMEMBERING[kind][0], **changes}
    shape = {"layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY, "chunk_size": CHUNK}
    return ModelConfig.model_validate({**shape, "init_std": 0.3, "mixer": mixer})


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_forgotten_memory_gives_the_losses_of_chunks_read_alone(kind):
    """Each chunk from fresh states of its own, for every mechanism and architecture."""
    stage, texts = stage_of(EVERY_KIND[kind].model(layers=2)).double(), documents(*LENGTHS)
    alone = [
        [slow_losses(stage, text, begin, begin + CHUNK).sum() for begin in range(0, text.predicted_tokens, CHUNK)]
        for text in texts
    ]
    report = Evaluator(stage, rows=ROWS).losses(texts, forget=True)
    assert report.tokens == sum(LENGTHS)
    assert report.nats == pytest.approx(sum(map(sum, alone)), rel=TOLERANCE)
    assert [found.loss * found.tokens for found in report.documents] == pytest.approx(list(map(sum, alone)))
    assert Evaluator(stage, rows=ROWS).memory_use(texts).memory_off_loss == pytest.approx(report.loss, rel=TOLERANCE)


@pytest.mark.parametrize("sticky", ["none", "random"])
@pytest.mark.parametrize("short", [SHORT, None])
def test_the_long_term_memory_is_taken_away_alone(short, sticky):
    """What is left are the losses of the same weights as Transformer-XL with the same cache, or local attention."""
    stage = stage_of(remembering("infinity_former", short_memory=short, sticky=sticky)).double()
    left = {"kind": "local_attention"} if short is None else {"kind": "transformer_xl", "memory_length": short}
    model = ModelConfig.model_validate({**stage.config.model_dump(), "mixer": left})
    plain, weights = build_stage(model, PlainLinears()).double(), stage.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    texts, wanted = documents(*LENGTHS), Evaluator(plain, rows=ROWS)
    run = config(model={"chunk_size": CHUNK})
    figures = []
    for forget in (False, True):
        asked = EvaluationConfig(forget_long_term=forget, sliding_stride=CHUNK)
        evaluator = Evaluator(stage, rows=ROWS)
        found = final_evaluation(evaluator, lambda: texts, None, run.model_copy(update={"evaluation": asked}))
        figures.append(found.figures())
        assert not evaluator.reader.forgets_long_term
    kept, forgotten = figures
    assert forgotten["val_loss"] == pytest.approx(wanted.losses(texts).loss, rel=TOLERANCE)
    assert forgotten["val_loss"] != pytest.approx(kept["val_loss"], abs=1e-4), "the memory matters"
    assert forgotten["memory_off_loss"] == pytest.approx(kept["memory_off_loss"], rel=TOLERANCE)
    sliding = wanted.sliding_losses(texts, stride=CHUNK)
    assert forgotten["sliding_perplexity"] == pytest.approx(sliding.perplexity, rel=1e-6)


def test_a_long_term_memory_to_forget_is_needed():
    said = "evaluation.forget_long_term true: no layer is an infinity_former with a short_memory, whose long-term"
    with pytest.raises(ConfigError, match=said):
        config(evaluation={"forget_long_term": True})
    model = {"chunk_size": CHUNK, "mixer": {"kind": "infinity_former", **OLD}}
    assert config(evaluation={"forget_long_term": True}, model=model).evaluation.forget_long_term


def test_the_option_takes_the_memory_away_from_all_figures():
    stage, texts = stage_of(remembering("transformer_xl")), documents(*LENGTHS)
    run = config(model={"chunk_size": CHUNK})
    figures = []
    for forget in (False, True):
        asked = run.model_copy(update={"evaluation": EvaluationConfig(forget_every_chunk=forget, sliding_stride=CHUNK)})
        figures.append(final_evaluation(Evaluator(stage, rows=ROWS), lambda: texts, None, asked).figures())
    kept, forgotten = figures
    assert kept["val_loss"] != pytest.approx(kept["memory_off_loss"], abs=1e-3), "the memory matters"
    assert forgotten["val_loss"] == forgotten["memory_off_loss"] == kept["memory_off_loss"]
    assert forgotten["beyond_first_chunk_loss"] == kept["memory_off_beyond_first_chunk_loss"]
    assert (forgotten["memory_gain"], forgotten["sliding_perplexity"]) == (0, None)
    assert kept["sliding_perplexity"] is not None


@pytest.mark.parametrize("kind", REMEMBERING)
def test_a_memory_of_another_length_is_that_of_a_model_built_with_it(kind, tmp_path, monkeypatch):
    """From a checkpoint and from an export: trained with one length, read with twice as much."""
    trained, texts = stage_of(remembering(kind)), documents(*LENGTHS)
    longer = stage_of(remembering(kind, **REMEMBERING[kind][1]))
    longer.load_state_dict(trained.state_dict())
    wanted = Evaluator(longer, rows=ROWS).losses(texts).nats
    assert wanted != pytest.approx(Evaluator(trained, rows=ROWS).losses(texts).nats, abs=1e-3), "the length matters"

    weights = [(name, value.detach()) for name, value in trained.named_parameters()]
    monkeypatch.setattr(whole, "read_weights", lambda checkpoint: iter(weights))
    read = whole_model(None, remembering(kind, **REMEMBERING[kind][1]))
    assert Evaluator(read, rows=ROWS).losses(texts).nats == wanted

    exported(trained, tmp_path)
    changes = [f"model.mixer.{name}={value}" for name, value in REMEMBERING[kind][1].items()]
    found = open_exported(tmp_path, changes)
    assert found.config.model.mixer == remembering(kind, **REMEMBERING[kind][1]).mixer
    assert Evaluator(found.load(), rows=ROWS).losses(texts).nats == pytest.approx(wanted, rel=1e-6)


def exported(stage, folder):
    model = MegamemForCausalLM(MegamemConfig(megamem=stage.config.model_dump(mode="json")))
    model.model.load_state_dict(stage.state_dict())
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "change", "of_a_checkpoint", "of_an_export"),
    [
        ("compressive_transformer", {"ratio": 2}, "has shape .* but the model's is", "would have shape"),
        ("infinity_former", {"short_memory": None}, "but not in both", "is not in the model that was asked for"),
        ("infinity_former", {"gate_init": 0.0}, "but not in both", "holds nothing for layers.0.mixer.gate.logit"),
    ],
)
def test_what_parameters_depend_on_is_refused(kind, change, of_a_checkpoint, of_an_export, tmp_path, monkeypatch):
    stage = stage_of(remembering(kind))
    monkeypatch.setattr(whole, "read_weights", lambda checkpoint: iter(list(stage.named_parameters())))

    class Saved:
        path = tmp_path / "step-00000001"

    with pytest.raises(CheckpointError, match=of_a_checkpoint):
        whole_model(Saved(), remembering(kind, **change))
    exported(stage, tmp_path / "hf")
    ((name, value),) = change.items()
    with pytest.raises(ConversionError, match=of_an_export):
        open_exported(tmp_path / "hf", [f"model.mixer.{name}={'null' if value is None else value}"]).load()
    with pytest.raises(ConfigError, match=r"memory_length 12 is no multiple of model\.chunk_size 8"):
        open_exported(tmp_path / "hf", ["model.mixer={kind: compressive_transformer, memory_length: 12}"])


def test_models_are_opened_by_what_lies_at_their_path(tmp_path):
    exported(stage_of(remembering("transformer_xl")), tmp_path / "hf")
    assert is_exported(tmp_path / "hf")
    assert not is_exported(tmp_path)
    assert open_trained(tmp_path / "hf").title == "hf"
    with pytest.raises(CheckpointError):
        open_trained(tmp_path)


def test_an_export_has_no_text_of_its_own(tmp_path):
    exported(stage_of(remembering("transformer_xl")), tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"hf: its configuration names no held-out text; give data\.validation="):
        evaluate_run(open_exported(tmp_path / "hf", []), torch.float32, CPU)
    with pytest.raises(DataError, match="missing"):
        evaluate_run(open_exported(tmp_path / "hf", ["data.validation=[missing]"]), torch.float32, CPU)
