"""The final evaluation as a whole, the files it writes and its table."""

import dataclasses
import io
import json
import math
import threading
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED
from megamem.evaluation import run
from megamem.evaluation.baselines import lzma_baseline
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.metrics import read_curves
from megamem.evaluation.report import finite, result_table, write_report
from megamem.evaluation.run import final_evaluation
from megamem.parallel.topology import Topology
from tests.unit.evaluation_helpers import CHUNK, CPU, ROWS, documents, make_stage, model_config
from tokenization.text_size import TextSize
from tokenization.train import train

NO_GROUPS = {field.name: None for field in dataclasses.fields(Topology) if field.name.endswith("_group")}
TOPOLOGY = Topology(pp_size=1, dp_size=1, tp_size=1, rank=0, device=CPU, **NO_GROUPS)
METRICS = [
    {"step": 1, "tokens": 100, "loss": 4.0, "lr": 1e-3},
    {"step": 2, "tokens": 200, "loss": 9.0},
    {"step": 3, "tokens": 300, "loss": 9.0},
    {"step": 2, "tokens": 200, "loss": 3.5},
    {"step": 2, "tokens": 200, "val_loss": 3.6, "val_bits_per_byte": 2.0},
    {"step": 3, "tokens": 300, "loss": 3.0},
    {"step": 4, "tokens": 400, "loss": math.nan},
]


class FakeTokenizer:
    """Every token stands for the two letters of its number."""

    vocabulary_hash = "two letters"

    def token_bytes(self):
        return [b"%02d" % i for i in range(32)]


def config(**evaluation) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "a-run",
            "model": model_config("elastic_memory").model_dump(),
            "data": {"sources": ["none"], "sequence_length": 4 * CHUNK},
            "training": {"steps": 4, "batch_tokens": 4 * CHUNK},
            "evaluation": {"rows": 3, **evaluation},
        }
    )


def evaluate(kind="elastic_memory", texts=None, tokenizer=None, topology=TOPOLOGY, settings=None, **more):
    texts = documents(40, 9, 25) if texts is None else texts
    return final_evaluation(
        Evaluator(make_stage(kind), topology, ROWS), lambda: iter(texts), tokenizer or FakeTokenizer(),
        settings or config(), **more,
    ).to_dict()  # fmt: skip


def write_metrics(folder, lines=METRICS):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 5, "tok')


def test_the_figures_are_those_of_the_parts():
    texts = documents(40, 9, 25)
    result = evaluate(texts=texts)
    plain = Evaluator(make_stage("elastic_memory"), rows=ROWS).losses(texts)
    assert result["val_loss"] == plain.loss
    assert result["val_bits_per_byte"] == plain.bits_per_byte
    nats, size = plain.nats, TextSize.sum(text.text_size for text in texts)
    assert result["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / size.bytes)
    assert result["val_bits_per_character"] == pytest.approx(nats / math.log(2) / size.characters)
    assert result["val_word_perplexity"] == pytest.approx(math.exp(nats / size.words))
    assert result["val_word_perplexity_with_line_ends"] == pytest.approx(math.exp(nats / (size.words + size.lines)))
    assert result["losses"]["text_size"] == dataclasses.asdict(size)
    assert result["lzma_bits_per_byte"] == lzma_baseline(texts, FakeTokenizer()).bits_per_byte
    assert result["memory_gain"] == (result["memory_off_beyond_first_chunk_loss"] - result["beyond_first_chunk_loss"])
    assert result["beyond_first_chunk_loss"] == plain.beyond_first_chunk_loss
    assert result["sliding_perplexity"] == result["sliding"]["perplexity"]
    assert result["sliding"]["stride"] == CHUNK // 4
    assert result["val_tokens"] == 74
    assert result["evaluation_tokens_per_second"] > 0
    assert result["picture"] is None
    json.dumps(result, allow_nan=False)


def test_tasks_are_not_read_through_a_window(tmp_path):
    """The first two chunks ask for nothing: no window, and nothing is divided by their tokens."""
    (text,) = documents(3 * CHUNK)
    labels = text.labels.clone()
    labels[: 2 * CHUNK] = IGNORED
    result = evaluate(texts=[replace(text, labels=labels)], folder=tmp_path)
    assert result["sliding_perplexity"] is None
    assert result["sliding"] is None
    assert result["val_tokens"] == CHUNK
    assert 0 <= result["val_accuracy"] <= 1
    json.loads((tmp_path / "evaluation.json").read_text())


def test_bounds_of_the_configuration():
    result = evaluate(texts=documents(90, 90), settings=config(final_max_tokens=130, sliding_max_tokens=70))
    assert result["val_tokens"] == 128
    assert result["losses"]["text_size"]["bytes"] == 2 * 128, "the bytes of the cut documents, from the tokenizer"
    assert result["sliding"]["tokens"] == 64


def test_without_a_tokenizer_there_are_no_bytes():
    texts = documents(90, 90)
    result = final_evaluation(
        Evaluator(make_stage("local_attention"), rows=ROWS), lambda: texts, None, config(final_max_tokens=130)
    ).to_dict()
    assert result["val_bits_per_byte"] is result["lzma_bits_per_byte"] is result["lzma"] is None
    write = io.StringIO()
    Console(file=write, width=100).print(result_table(result))
    assert "LZMA" not in write.getvalue()


def test_only_rank_0_compresses_and_writes(tmp_path):
    other = Topology(pp_size=1, dp_size=1, tp_size=2, rank=1, device=CPU, **NO_GROUPS)
    result = evaluate(topology=other, folder=tmp_path)
    assert result["lzma_bits_per_byte"] is result["picture"] is None
    assert list(tmp_path.iterdir()) == []
    assert result["val_loss"] == evaluate()["val_loss"]


def test_a_stride_that_does_not_fit_is_refused_before_any_work():
    with pytest.raises(ValueError, match="sliding_stride 3 does not divide"):
        config(sliding_stride=3)


def test_progress_is_shown_and_told_to_the_watchdog():
    shown, told = io.StringIO(), []
    evaluate(console=Console(file=shown, width=100, force_terminal=True), watch=told.append)
    for name in ("held-out loss", "memory off", "sliding window"):
        assert name in shown.getvalue()
        assert any(name in words for words in told)


def test_the_watchdog_hears_of_a_slow_baseline(monkeypatch):
    told, waits = [], threading.Event()

    def slow(documents, tokenizer):
        assert waits.wait(30)

    monkeypatch.setattr(run, "lzma_baseline", slow)

    def watch(words):
        told.append(words)
        if "LZMA" in words:
            waits.set()

    evaluate(watch=watch)
    assert told[-1] == "evaluation, LZMA baseline"


@pytest.mark.parametrize("curve", [True, False])
@pytest.mark.parametrize("kind", ["local_attention", "elastic_memory"])
def test_report_and_picture(tmp_path, kind, curve):
    if curve:
        write_metrics(tmp_path)
    result = evaluate(kind, folder=tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == json.loads(json.dumps(result))
    assert result["picture"] == str(tmp_path / "evaluation.png")
    data = (tmp_path / "evaluation.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1920, 780)
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation.json", "evaluation.png"} | (
        {"metrics.jsonl"} if curve else set()
    )


def test_the_picture_of_short_documents_and_of_a_diverged_model(tmp_path):
    evaluate(texts=documents(1), folder=tmp_path)
    stage = make_stage("local_attention")
    torch.nn.init.constant_(stage.head.weight, math.nan)
    final_evaluation(
        Evaluator(stage, TOPOLOGY, ROWS), lambda: documents(20), FakeTokenizer(), config(), folder=tmp_path
    )
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert report["val_loss"] is None
    assert report["lzma_bits_per_byte"] > 0


def test_curves_take_the_last_line_of_a_step(tmp_path):
    write_metrics(tmp_path)
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert curves.training == ((100, 4.0), (200, 3.5), (300, 3.0))
    assert curves.validation == ((200, 3.6),)
    assert read_curves(tmp_path / "absent.jsonl").training == ()


def test_the_table_shows_what_there_is():
    shown = io.StringIO()
    result = evaluate() | {"steps": 1200, "tokens": 4_915_200, "tokens_per_second": 12345.6}
    Console(file=shown, width=100).print(result_table(result, "a-run"))
    text = shown.getvalue()
    for words in (
        f"{result['val_bits_per_byte']:.4f}",
        f"{result['val_bits_per_character']:.4f}",
        f"{result['val_word_perplexity']:,.2f} per word",
        f"{result['val_word_perplexity_with_line_ends']:,.2f} per word or line end",
        "LZMA on the same text",
        "12,346 tokens/s",
        "4,915,200",
        "1,200",
    ):
        assert words in text
    assert "training speed" not in _shown(evaluate())


def _shown(result):
    shown = io.StringIO()
    Console(file=shown, width=100).print(result_table(result))
    return shown.getvalue()


def test_a_real_tokenizer_goes_through(tmp_path):
    tokenizer = train(["a few words " * 20], 300, tmp_path / "tokenizer")
    assert evaluate(tokenizer=tokenizer)["lzma_bits_per_byte"] > 0


def test_what_json_has_no_word_for():
    assert finite({"a": [1.5, math.inf, (math.nan, 2)], "b": None}) == {"a": [1.5, None, [None, 2]], "b": None}


def test_writing_makes_the_folder(tmp_path):
    write_report(tmp_path / "new", evaluate(), "title")
    assert (tmp_path / "new" / "evaluation.png").is_file()
