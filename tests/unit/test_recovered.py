"""The recovered share: formula, bootstrap, what it is of, what is refused, end to end with tiny models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megamem.config.evaluation import CorruptionConfig
from megamem.config.load import parse_config
from megamem.config.run import RunConfig
from megamem.errors import ConfigError, DataError
from megamem.evaluation.recovered import (
    Interval,
    ModelLosses,
    chunk_groups,
    read_losses,
    recovered_share,
    share_over_control,
)
from megamem.evaluation.recovered_report import NUMBERS, PICTURE, recovered_table, shown_interval, write_recovered
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.training import held_out
from megamem.training.held_out import evaluate_recovered
from tests.unit.evaluation_helpers import CHUNK, CPU, VOCABULARY, documents, slow_losses
from tests.unit.test_run_config import config

TOKENS = np.array([[7, 8, 8, 8, 3], [8, 8, 0, 0, 0], [8, 8, 8, 0, 0], [5, 0, 0, 0, 0], [8, 8, 8, 8, 8]], dtype=float)
"""Of five documents in chunks of 8, the fourth of which is no longer than a chunk."""


def losses(name: str, level: float, seed: int, off: float | None = None) -> ModelLosses:
    """Losses around so many nats per token."""
    noise = np.random.default_rng(seed)
    nats = TOKENS * (level + 0.3 * noise.standard_normal(TOKENS.shape))
    off_nats = nats if off is None else TOKENS * (off + 0.3 * noise.standard_normal(TOKENS.shape))
    names = tuple(f"document {number}" for number in range(len(TOKENS)))
    return ModelLosses(f"runs/{name}", name, CHUNK, "0123456789abcdef", "text", names, nats, TOKENS, off_nats)


LOCAL, FULL, MEMORY = losses("local", 4.0, 0), losses("full", 3.0, 1), losses("memory", 3.4, 2, off=3.9)


def test_the_share_is_a_ratio_of_losses_beyond_the_first_chunk() -> None:
    report = recovered_share(LOCAL, FULL, MEMORY)
    mean = {m.title: m.nats[:, 1:].sum() / TOKENS[:, 1:].sum() for m in (LOCAL, FULL, MEMORY)}
    total = report.beyond_first_chunk
    assert (report.documents, total.tokens) == (4, int(TOKENS[:, 1:].sum()))
    assert (total.first, total.last) == (CHUNK + 1, 5 * CHUNK)
    assert (total.local_loss, total.full_loss, total.memory_loss) == pytest.approx(tuple(mean.values()), rel=1e-14)
    wanted = (mean["local"] - mean["memory"]) / (mean["local"] - mean["full"])
    assert total.recovered.share == pytest.approx(wanted, rel=1e-12)
    off = MEMORY.memory_off_nats[:, 1:].sum() / TOKENS[:, 1:].sum()
    assert total.memory_off_loss == pytest.approx(off, rel=1e-14)
    assert total.memory_off.share == pytest.approx((mean["local"] - off) / (mean["local"] - mean["full"]), rel=1e-12)
    assert total.by_memory.share == pytest.approx(total.recovered.share - total.memory_off.share, rel=1e-12)
    assert report.figures()["recovered_share_low"] == total.recovered.low


def test_local_and_full_attention_themselves_recover_nothing_and_all() -> None:
    for model, share in ((LOCAL, 0.0), (FULL, 1.0)):
        found = recovered_share(LOCAL, FULL, model).beyond_first_chunk.recovered
        assert found == Interval(share, share, share)


def test_positions_are_groups_of_chunks_that_grow() -> None:
    assert chunk_groups(1) == [(0, 1)]
    assert chunk_groups(4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert chunk_groups(20) == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 7), (7, 10), (10, 15), (15, 20)]
    parts = recovered_share(LOCAL, FULL, MEMORY).by_position
    assert [(part.first, part.last) for part in parts] == [(9, 16), (17, 24), (25, 32), (33, 40)]
    for number, part in enumerate(parts, start=1):
        own = [m.nats[:, number].sum() for m in (LOCAL, FULL, MEMORY)]
        assert part.recovered.share == pytest.approx((own[0] - own[2]) / (own[0] - own[1]), rel=1e-12)
    assert sum(part.tokens for part in parts) == TOKENS[:, 1:].sum()


def test_the_interval_is_that_of_a_bootstrap_over_documents() -> None:
    """Against document after document, drawn with another generator: of 20,000 draws the ends differ by some 0.01."""
    found = recovered_share(LOCAL, FULL, MEMORY, draws=20_000).beyond_first_chunk.recovered
    rng = np.random.default_rng(99)
    long = [row for row in range(len(TOKENS)) if TOKENS[row, 1:].any()]
    shares = []
    for _ in range(20_000):
        nats = {"local": 0.0, "full": 0.0, "memory": 0.0}
        for row in rng.choice(long, size=len(long)):
            for model in (LOCAL, FULL, MEMORY):
                nats[model.title] += model.nats[row, 1:].sum()
        shares.append((nats["local"] - nats["memory"]) / (nats["local"] - nats["full"]))
    ordered = sorted(shares)
    assert found.low == pytest.approx(ordered[500], abs=0.02)
    assert found.high == pytest.approx(ordered[-501], abs=0.02)
    assert found.high - found.low > 0.1, "else nothing is compared"
    assert recovered_share(LOCAL, FULL, MEMORY, draws=20_000).beyond_first_chunk.recovered == found, "the same draws"


def test_beyond_a_control_differences_are_paired_by_document() -> None:
    """A control that errs with the model leaves an interval that neither share has alone."""
    # what is hard for the control is hard for the model: 0.2 nats a token less in every chunk, and a little by document
    own = np.array([0.0, 0.02, -0.02, 0.0, 0.01])[:, None]
    control = replace(MEMORY, title="control", nats=MEMORY.nats + TOKENS * (0.2 + own))
    found = share_over_control(LOCAL, FULL, MEMORY, control)
    shares = [recovered_share(LOCAL, FULL, model).beyond_first_chunk.recovered for model in (MEMORY, control)]
    assert found.share == pytest.approx(shares[0].share - shares[1].share, rel=1e-12)
    assert found.low < found.share < found.high
    assert found.high - found.low < 0.3 * (shares[0].high - shares[0].low)
    assert share_over_control(LOCAL, FULL, MEMORY, MEMORY) == Interval(0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match="runs/control and runs/local: are not evaluated on the same text"):
        share_over_control(LOCAL, FULL, MEMORY, replace(control, text_sha256="other", origin="runs/control"))


def test_pieces_of_a_document_are_drawn_together() -> None:
    """As one document whose sums are theirs."""
    names = ["book, tokens 0 to 1,999, tokens 0 to 999", "book, tokens 2,000 to 3,999", "a", "b", "c"]
    pieces, joined = [], []
    for model in (LOCAL, FULL, MEMORY):
        result = as_result(model, names)
        pieces.append(ModelLosses.of(result, model.origin, model.title))
        tables = [
            np.concatenate((t[:2].sum(0, keepdims=True), t[2:])) for t in (model.nats, TOKENS, model.memory_off_nats)
        ]
        joined.append(
            replace(model, names=("book", "a", "b", "c"), nats=tables[0], tokens=tables[1], memory_off_nats=tables[2])
        )
    assert pieces[0].names == ("book", "book", "a", "b", "c")
    found, wanted = recovered_share(*pieces), recovered_share(*joined)
    assert found.documents == wanted.documents == 3
    assert found.figures() == pytest.approx(wanted.figures(), rel=1e-12)


def as_result(model: ModelLosses, names: list[str]) -> dict[str, object]:
    """What an evaluation writes of such losses: rows as long as their documents."""

    def rows(table: np.ndarray) -> list[dict[str, object]]:
        lengths = (TOKENS > 0).sum(1)
        return [
            {"name": name, "chunk_nats": nats[:length].tolist(), "chunk_tokens": tokens[:length].tolist()}
            for name, nats, tokens, length in zip(names, table, TOKENS, lengths, strict=True)
        ]

    return {
        "chunk_size": model.chunk_size,
        "tokenizer": model.tokenizer,
        "losses": {"text_sha256": model.text_sha256, "documents": rows(model.nats)},
        "memory": {"memory_off_documents": rows(model.memory_off_nats)},
    }


def test_one_document_has_no_interval() -> None:
    alone = [
        replace(m, names=m.names[:1], nats=m.nats[:1], tokens=TOKENS[:1], memory_off_nats=m.memory_off_nats[:1])
        for m in (LOCAL, FULL, MEMORY)
    ]
    report = recovered_share(*alone)
    assert report.beyond_first_chunk.recovered.share is not None
    assert report.beyond_first_chunk.recovered.low is None
    assert shown_interval(report.beyond_first_chunk.recovered).endswith(" %")
    assert "one document gives no interval" in str(recovered_table(report).caption)


def test_positions_without_a_gap_have_no_share() -> None:
    full = replace(FULL, nats=np.concatenate((FULL.nats[:, :4], LOCAL.nats[:, 4:]), axis=1))
    *others, last = recovered_share(LOCAL, full, MEMORY).by_position
    assert last.recovered == Interval(None, None, None)
    assert shown_interval(last.recovered) == "no gap"
    assert all(part.recovered.share is not None for part in others)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"tokenizer": None},
            ConfigError,
            r"runs/full and runs/local: have different tokenizers \(no tokenizer and 0123",
        ),
        ({"tokenizer": "fedcba9876543210"}, ConfigError, r"different tokenizers \(fedcba987654 and 0123456789ab\)"),
        (
            {"chunk_size": 16},
            ConfigError,
            "have chunks of 16 and 8 tokens; evaluate both with the same model.chunk_size",
        ),
        (
            {"text_sha256": "other"},
            ConfigError,
            "are not evaluated on the same text; both need the same data.validation",
        ),
        (
            {"nats": LOCAL.nats},
            DataError,
            r"runs/full: its loss .* is not below the .* of runs/local, so there is no gap",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        recovered_share(LOCAL, replace(FULL, **changes), MEMORY)  # type: ignore[arg-type]


def test_documents_of_one_chunk_are_refused() -> None:
    short = [replace(m, nats=m.nats[:, :1], tokens=TOKENS[:, :1]) for m in (LOCAL, FULL, MEMORY)]
    with pytest.raises(DataError, match="runs/local: no document is longer than a chunk of 8 tokens"):
        recovered_share(*short)


def test_losses_are_read_from_an_evaluation(tmp_path: Path) -> None:
    result = as_result(MEMORY, list(MEMORY.names))
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    for path in (tmp_path, tmp_path / "evaluation.json"):
        found = read_losses(path)
        assert found.title == tmp_path.name
        np.testing.assert_array_equal(found.nats, MEMORY.nats)
        np.testing.assert_array_equal(found.memory_off_nats, MEMORY.memory_off_nats)
    del result["losses"]["text_sha256"]  # type: ignore[attr-defined]
    (tmp_path / "evaluation.json").write_text(json.dumps(result))
    with pytest.raises(DataError, match=r"evaluation.json: holds no losses of documents by chunk \('text_sha256'\)"):
        read_losses(tmp_path)
    with pytest.raises(DataError, match="nowhere: missing"):
        read_losses(tmp_path / "nowhere")


def test_the_report_of_a_share(tmp_path: Path) -> None:
    report = recovered_share(LOCAL, FULL, MEMORY)
    write_recovered(tmp_path / "out", report)
    found = json.loads((tmp_path / "out" / NUMBERS).read_text())
    assert found["recovered_share"] == report.beyond_first_chunk.recovered.share
    assert [part["first"] for part in found["by_position"]] == [9, 17, 25, 33]
    assert (tmp_path / "out" / PICTURE).stat().st_size > 20_000
    table = recovered_table(report)
    assert table.row_count == 5
    cells = list(table.columns[6].cells)
    assert cells[-1] == shown_interval(report.beyond_first_chunk.recovered)
    with pytest.raises(DataError, match="out: exists already"):
        write_recovered(tmp_path / "out", report)


@dataclass(frozen=True)
class Model:
    """A trained model without a checkpoint: its weights follow from its configuration's names and shapes."""

    config: RunConfig
    title: str

    @property
    def origin(self) -> str:
        return f"runs/{self.title}"

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        stage = build_stage(self.config.model, PlainLinears())
        initialize_parameters(stage, 1)
        return stage.double().to(device)


def model(kind: str) -> Model:
    shape = {"layers": 2, "hidden_size": 16, "heads": 4, "ffn_size": 32, "vocab_size": VOCABULARY, "chunk_size": CHUNK}
    run = config(model={**shape, "init_std": 0.3, "mixer": kind}, data={"validation": ["x"], "sequence_length": CHUNK})
    return Model(parse_config(RunConfig, run.model_dump(mode="json"), "test"), kind)


def test_three_models_read_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses as a loop finds them that reads one token at a time, with and without the memory."""
    texts = documents(50, 5, 19, 32)
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: texts)
    models = [model(kind) for kind in ("local_attention", "full_attention", "infini_attention")]
    slow = []
    for each in models:
        stage, total = each.load(), 0.0
        for text in texts:
            total += float(sum(slow_losses(stage, text)[CHUNK:]))
        slow.append(total)
    if slow[1] >= slow[0]:  # random weights may have it the other way round: then that is the gap
        models[:2], slow[:2] = models[1::-1], slow[1::-1]
    found = evaluate_recovered(*models, torch.float64, CPU).beyond_first_chunk
    assert found.recovered.share == pytest.approx((slow[0] - slow[2]) / (slow[0] - slow[1]), rel=1e-9)
    # local attention is the infini-attention with its memory off, weights aside
    assert found.tokens == sum(max(text.predicted_tokens - CHUNK, 0) for text in texts)
    assert math.isfinite(found.memory_off_loss)
    assert found.memory_off_loss != found.memory_loss


class Unread(Model):
    """A model that nobody may read with."""

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        raise AssertionError("texts differ, so nothing is to be read")


def test_other_texts_are_found_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"full_attention": documents(50), "infini_attention": documents(49)}
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: texts[config.model.mixer.kind])
    local, memory = (Unread(model(kind).config, kind) for kind in ("full_attention", "infini_attention"))
    for pair in ((local, memory), (replace(LOCAL, tokenizer=None), local)):
        with pytest.raises(ConfigError, match="are not evaluated on the same text; both need the same data"):
            evaluate_recovered(pair[0], pair[0], pair[1], torch.float64, CPU)


def test_a_gap_is_looked_for_before_the_third_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: documents(50, 19))
    plain, memory = model("local_attention"), Unread(model("infini_attention").config, "infini_attention")
    with pytest.raises(DataError, match="there is no gap"):
        evaluate_recovered(plain, plain, memory, torch.float64, CPU)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("forget_long_term", {"forget_long_term": True}),
        ("forget_every_chunk", {"forget_every_chunk": True}),
        (r"corruption\.share", {"corruption": CorruptionConfig(share=0.5)}),
    ],
)
def test_other_ways_of_reading_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, object]
) -> None:
    monkeypatch.setattr(held_out, "held_out_documents", lambda config: documents(50))
    run = model("infini_attention").config
    changed = run.model_copy(update={"evaluation": run.evaluation.model_copy(update=change)})
    with pytest.raises(
        ConfigError, match=rf"evaluation\.{name}: is for `megamem evaluate` alone; give evaluation\.{name}="
    ):
        evaluate_recovered(LOCAL, FULL, Unread(changed, "changed"), torch.float64, CPU)
