"""The benchmarks run, and their arithmetic is right."""

import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks import (
    continuous_memory,
    cpu,
    document_resets,
    gpu,
    kv_reconstruction,
    mechanisms,
    memory_growth,
    memory_models,
    segments,
    shared_prefixes,
    signed_distances,
    streaming,
    web_text,
)
from benchmarks.common import interleaved, model_from, random_batch, ratio, summary, table, without_memory
from benchmarks.gpu_engines import Minimal, run_config
from benchmarks.profiling import LOCAL, MEMORY, PARTS, seconds_by_part
from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.evaluation.losses import Bucket
from megamem.memory.continuous.gaussian_basis import Regression


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


def test_cpu_benchmark(tmp_path, capsys, one_thread):
    output = tmp_path / "folder" / "cpu.json"
    cpu.main(["--quick", "--threads", str(one_thread), "--output", str(output)])
    printed = capsys.readouterr().out
    record = last_json(printed)
    assert record == json.loads(output.read_text())
    result = record["shapes"]["quick"]
    assert record["elastic_over_local"]["quick"] == result["over_local"]["elastic memory"]["median"] > 0
    assert set(result["tokens_per_second"]) == {"elastic memory", "chunk-local attention", "full attention"}
    assert all(rate["low"] <= rate["median"] <= rate["high"] for rate in result["tokens_per_second"].values())
    assert "| memory update |" in printed
    assert "1 threads" in printed


def test_shared_prefixes_benchmark(tmp_path, capsys, one_thread):
    output = tmp_path / "shared_prefixes.json"
    shared_prefixes.main(
        ["--quick", "--turns", "1", "--threads", str(one_thread), "--mixers", "elastic memory", "--output", str(output)]
    )
    record = last_json(capsys.readouterr().out)
    assert record == json.loads(output.read_text())
    found = record["mixers"]["elastic memory"]
    assert found["same_texts"]
    assert found["largest_difference_nats"] < 1e-4  # FP32, sums of eight tokens in another order
    assert found["scored"]["median"] > 1


def test_memory_model_benchmark(tmp_path, capsys, one_thread, monkeypatch):
    asked = []
    monkeypatch.setattr(memory_models, "peak", lambda *of: asked.append(of[:3]) or 3 * 2**20)
    output = tmp_path / "memory_models.json"
    memory_models.main(["--quick", "--turns", "1", "--threads", str(one_thread), "--output", str(output)])
    printed = capsys.readouterr().out
    record = last_json(printed)
    assert record == json.loads(output.read_text())
    forms = list(memory_models.models(64, quick=True))
    assert asked == [(name, 64, kind) for kind in ("training", "reading") for name in forms]
    for kind in ("training", "reading"):
        found = record["contexts"]["64"][kind]
        assert found["over_transformer"]["transformer"]["median"] == 1
        rate, ratios = found["tokens_per_second"], found["over_transformer"]
        for name in forms:
            assert ratios[name]["median"] == pytest.approx(rate[name]["median"] / rate["transformer"]["median"])
        # one memory row in half of all chunks instead of in each
        counted = found["flops_over_transformer"]
        assert counted["memory model, fixed"] < counted["memory model, variable"] < 1
    assert [(each["chunks"], each["rows"]) for each in record["encoder"]] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert "| transformer |" in printed


def test_memory_that_a_pass_adds():
    """Two chunks' logits and their gradients at least: so large that no allocator keeps them from pass to pass."""
    model = memory_models.models(64, quick=True)["memory model, fixed"].model_copy(update={"vocab_size": 400_000})
    logits = 64 * 400_000 * 4
    # a process of its own: what other tests have left free would be taken again
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        added = processes.submit(memory_models.added_memory, model, 64, "training").result()
    # what the process had freed before is used again, so a little less than the two may be added: 94 KB of 205 MB were
    assert 1.95 * logits < added < 10 * logits


def test_what_is_encoded_side_by_side_is_what_is_encoded_one_by_one():
    runs = memory_models.encoder_runs(memory_models.models(64, quick=True)["memory model, fixed"], 2, 3)
    assert list(runs) == ["training, apart", "training, together", "reading, apart", "reading, together"]
    for run in runs.values():
        run()


def test_profile_finds_every_part_forward_and_backward():
    shape = cpu.shapes(quick=True)["quick"]
    elastic = seconds_by_part(*cpu.unit(shape.model, shape), passes=1)
    plain = seconds_by_part(*cpu.unit(without_memory(shape.model), shape), passes=1)
    assert set(elastic) == set(PARTS)
    assert all(seconds > 0 for seconds in elastic.values())
    assert [part for part in PARTS if plain[part] == 0] == [MEMORY, "memory retrieval", "memory update"]
    assert plain[LOCAL] > 0


def test_backward_time_belongs_to_the_part_that_made_it():
    """Nearly all work of this model is its MLP; were the backward pass not traced back, it would be `other`."""
    shape = cpu.shapes(quick=True)["quick"]
    model = shape.model.model_copy(update={"ffn_size": 30_000})
    parts = seconds_by_part(*cpu.unit(model, shape), passes=1)
    assert parts["MLP"] > 0.6 * sum(parts.values())


def test_runs_take_turns_in_alternating_order():
    order = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert [len(t.wall) for t in times.values()] == [len(t.processor) for t in times.values()] == [3, 3]
    assert len(interleaved({"a": lambda: None}, 50, budget_s=0)["a"].wall) == 1


def test_ratios_are_of_the_same_turn():
    # a machine that is ten times slower in the second turn changes no ratio
    assert ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert summary([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "low": 1.75, "high": 3.25}
    assert table(["x", "y"], [[1, 2]]) == "| x | y |\n| --- | --- |\n| 1 | 2 |"


def test_joined_batches_begin_documents_at_any_token():
    model = document_resets.models(quick=True, names=[])["retnet"]
    batch = document_resets.joined(model, chunks=2, rows=3)
    assert batch.begins is not None
    for row in range(3):
        begins = np.flatnonzero(batch.begins[:, row])
        assert begins[0] == 0
        last = begins[begins <= model.chunk_size][-1]
        assert batch.starts[:, row].tolist() == [0, model.chunk_size - last]
    assert document_resets.measure(model, rows=1, turns=1, budget_s=0)["exact_over_none"]["median"] > 0


def test_batches_hold_documents_where_they_are_told_to_begin():
    model = cpu.shapes(quick=True)["quick"].model
    batch = random_batch(model, 3, 2, begin=[0, 1])
    assert batch.tokens.shape == (3 * model.chunk_size, 2)
    assert batch.starts.tolist() == [[0, 0], [16, 0], [32, 16]]
    assert torch.equal(batch.tokens[1:], batch.labels[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["minimal", pytest.param("real", marks=pytest.mark.distributed)])
def test_gpu_benchmark_on_the_cpu(engine, tmp_path):
    """In a process of its own: the real engine makes process groups."""
    import subprocess
    import sys

    output = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--tiny", "--engine", engine, "--backend", "eager", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], check=True, capture_output=True, text=True, timeout=300
    )
    record = last_json(done.stdout)
    assert record == json.loads(output.read_text())
    assert record["engine"] == engine
    places = {(c["kind"], c["length"], c["compile"]) for c in record["cells"]}
    assert places == {(k, n, c) for k in ("transformer", "elastic") for n in (32, 64) for c in (False, True)}
    assert all(c["tokens_per_second"]["median"] > 0 and c["mfu"] is None for c in record["cells"])
    # random tokens of 64: log 64 = 4.16 nats at the start
    assert all(3.5 < c["loss"] < 4.5 for c in record["cells"])
    assert record["reached"] == {"transformer_mfu": None, "elastic_over_transformer": None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_benchmark_says_why_it_does_nothing(capsys):
    gpu.main([])
    assert capsys.readouterr().out == "benchmarks.gpu: needs a CUDA device and torch finds none; nothing measured\n"


def test_goals_take_the_best_of_plain_and_compiled():
    def cell(kind, rate, compiled, mfu=None):
        rates = {"median": rate, "low": rate, "high": rate}
        return gpu.Cell("760m", kind, 4096, 1, compiled, False, rates, mfu, None, 4.0)

    cells = [cell("transformer", 10, False, 0.2), cell("transformer", 20, True, 0.4), cell("elastic", 19, True)]
    assert gpu.goals(cells) == {"transformer_mfu": 0.4, "elastic_over_transformer": 0.95}


def test_out_of_memory_halves_rows_then_recomputes(monkeypatch):
    options = gpu.parse(["--device", "cpu", "--tiny"])
    options.tokens = 4 * 32
    bench = gpu.Bench(options, "minimal", "tiny", "elastic", float("inf"))
    tried = []

    def cell(engine, length, rows, compiled, recompute):
        tried.append((rows, recompute))
        if not recompute:
            raise torch.OutOfMemoryError
        return "fits"

    monkeypatch.setattr(bench, "_cell", cell)
    assert bench._fitted(32, False, "what") == "fits"
    assert tried == [(4, False), (2, False), (1, False), (1, True)]
    monkeypatch.setattr(bench, "_cell", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError))
    assert bench._fitted(32, False, "what") is None
    assert "out of memory" in bench.notes[-1]


def test_cells_beyond_the_deadline_are_named():
    bench = gpu.Bench(gpu.parse(["--device", "cpu", "--tiny"]), "minimal", "tiny", "elastic", 0.0)
    assert bench.run() == []
    assert len(bench.notes) == 4
    assert all("time was up" in note for note in bench.notes)


@pytest.mark.parametrize("size", ["100m", "400m", "760m"])
@pytest.mark.parametrize("kind", gpu.KINDS)
def test_every_cell_is_a_valid_run(size, kind):
    model = gpu.model_of(size, kind)
    for length in gpu.parse([]).lengths:
        config = run_config(model, length, 1, "cpu")
        # the engine is built once and resized, which holds only while a step is one backward pass
        assert config.accumulation_steps(1) == config.chunks // config.bptt_chunks == 1


def test_minimal_engine_learns():
    engine = Minimal(gpu.tiny_model("elastic"), 64, 2, "cpu")
    for group in engine._optimizer.param_groups:
        group["lr"] = 1e-2
    batch = random_batch(gpu.tiny_model("elastic"), 4, 2)
    losses = [engine.step(batch).item() for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.dtype == torch.bfloat16 for p in engine.stage.parameters())


def test_forms_of_a_model():
    model = model_from(cpu.shipped_model("elastic-100m"), chunk_size=512)
    assert (model.chunk_size, model.mixer_at(8).kind) == (512, "elastic_memory")
    assert {without_memory(model, "full_attention").mixer_at(i).kind for i in range(12)} == {"full_attention"}


def test_keys_and_values_are_those_the_memory_stores():
    """Collected over two chunks; a constant signal is reproduced by one coefficient, noise by as many as tokens."""
    shape = cpu.shapes(quick=True)["quick"]
    stage, _ = cpu.unit(shape.model, shape)
    documents = [torch.randint(64, (32,), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    signal = kv_reconstruction.keys_and_values(stage, documents)
    assert signal.shape == (32, 2, 2, shape.model.resolved_kv_heads, shape.model.resolved_head_dim)
    known = {order: kv_reconstruction.errors(signal, order, 0.5) for order in (1, 8, 31)}
    assert known[1]["keys_over_variance"] == pytest.approx(1, rel=1e-6), "one coefficient is the mean"
    assert known[31]["values_over_variance"] < known[8]["values_over_variance"] < 1
    constant = kv_reconstruction.errors(torch.ones_like(signal) + signal * 1e-9, 1, 0.0)
    assert constant["keys"] < 1e-15


def test_a_text_by_tenths():
    chunks = [Bucket(chunk, chunk, tokens=8, loss=float(chunk)) for chunk in range(40)]
    assert streaming.tenths(chunks) == [4 * part + 1.5 for part in range(10)]


class TestSignedDistances:
    """Figure 7 of LaMemo."""

    def test_by_a_loop(self):
        for distance in (-3, 1, 7):
            w = [10000 ** (-2 * k / 8) for k in range(1, 5)]
            pairs = [(k, other) for k in range(4) for other in range(4) if k != other]
            naive = sum(math.sin(w[k] * distance) * math.cos(w[other] * distance) for k, other in pairs)
            assert float(signed_distances.odd_part(torch.tensor([distance]), 8)) == pytest.approx(naive, abs=1e-12)

    def test_it_is_what_variances_differ_by(self):
        """Of scores with one variance and one covariance, ahead and behind: 4 c (g + pairs of one frequency)."""
        w, s, c = signed_distances.frequencies(16), 1.0, 0.05
        covariance = (s - c) * torch.eye(16, dtype=torch.float64) + c
        behind, ahead = (torch.cat(((x * w).sin(), (x * w).cos())) for x in (2.0, -2.0))
        difference = behind @ covariance @ behind - ahead @ covariance @ ahead
        own = ((2.0 * w).sin() * (2.0 * w).cos()).sum()
        expected = 4 * c * (signed_distances.odd_part(torch.tensor([2]), 16)[0] + own)
        assert float(difference) == pytest.approx(float(expected), abs=1e-12)

    def test_the_table(self, tmp_path, capsys):
        signed_distances.main(["--output", str(tmp_path / "s.json")])
        record = json.loads((tmp_path / "s.json").read_text())
        close = signed_distances.odd_part(torch.tensor([1e-6], dtype=torch.float64), 64)
        assert record["slope"] == pytest.approx(float(close) / 1e-6, rel=1e-6)
        assert (tmp_path / "s.png").stat().st_size > 1000
        assert "| 1 | 87.8 | -87.8 |" in capsys.readouterr().out


@pytest.mark.slow
def test_every_mechanism_is_timed_as_it_reads(tmp_path, capsys, one_thread):
    mechanisms.main(["--quick", "--reading", "--threads", "1", "--output", str(tmp_path / "m.json")])
    record = json.loads((tmp_path / "m.json").read_text())
    assert set(record["over_full"]) == {"elastic", "memorizing", "infini", "melodi", mechanisms.LOCAL, mechanisms.FULL}
    assert record["met"] == {}
    assert "| 1.06 |" in capsys.readouterr().out


@pytest.mark.slow
def test_every_mechanism_is_timed(tmp_path, capsys, one_thread):
    mechanisms.main(["--quick", "--threads", "1", "--output", str(tmp_path / "m.json")])
    record = json.loads((tmp_path / "m.json").read_text())
    assert set(record["met"]) == {"elastic", "memorizing", "infini", "melodi"}
    assert set(record["over_full"]) == set(record["over_local"]) >= {"full attention", "infini"}
    assert all(record["profile_seconds"]["infini"][part] > 0 for part in ("memory retrieval", "memory update"))
    assert "| melodi |" in capsys.readouterr().out


def test_segments_are_timed_over_local_attention(tmp_path, capsys, one_thread):
    segments.main(["--quick", "--threads", "1", "--output", str(tmp_path / "s.json")])
    record = json.loads((tmp_path / "s.json").read_text())
    assert set(record["goals"]) < set(record["over_local"])
    assert all(record["over_local"][name]["median"] > 0 for name in record["goals"])
    # each memory computes something beside local attention
    assert all(record["flops_over_local"][name] < 1 for name in record["goals"])
    assert "| infinity_former, sticky |" in capsys.readouterr().out


def test_lamemo_is_timed_over_transformer_xl_at_their_published_shape(tmp_path, capsys, one_thread):
    segments.main(["--published", "--quick", "--threads", "1", "--output", str(tmp_path / "s.json")])
    record = json.loads((tmp_path / "s.json").read_text())
    for what in ("training", "reading"):
        assert record[f"{what}_ratio"]["median"] > 0
        # memory rows are computed in each layer but the topmost one
        assert 0.5 < record[f"{what}_flops_ratio"] < 1
    assert "| reading |" in capsys.readouterr().out


def test_what_a_continuous_signal_keeps():
    """A random walk is kept, the newer the better; of white noise little is."""
    basis, ridge, tokens, tau = continuous_memory.SHAPES["WikiText-103: 150 functions, 150 tokens"]
    regression = Regression(basis, ridge, tokens, 512, tau, "none")
    vectors = continuous_memory.signals(3 * tokens)
    walk, noise = (continuous_memory.kept(regression, vectors[kind]) for kind in ("random walk", "noise"))
    assert walk[0] < walk[1] < 0.1
    assert 0.5 < noise[0] < noise[1] < 1


def test_web_text_measures_both_formats(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text of some words, again and again. " * 2000)
    web_text.main([str(tmp_path), "--vocab-size", "300"])
    rows = dict(line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    for name in ("web.parquet", "web.jsonl.zst"):
        assert int(rows[f"`{name}`: tokens/s of a core, from file to shards"].replace(",", "")) > 0
        # two bytes each, headers and names besides
        assert float(rows[f"`{name}`: bytes of a token in the shards"]) > 2
    assert int(rows["documents"]) > 5


CONTINUED = {"kind": "memory_caching", "segment": 64, "write": "continued"}


@pytest.mark.parametrize(
    ("kind", "more", "bound", "times"),
    [("dla", {}, 0.1, 1e3), ("dla", CONTINUED, 0.5, 1e3), ("titans", {}, 0.5, None), ("memora", {}, 10.0, None)],
)
def test_a_layer_norm_keeps_a_memory_from_growing(kind, more, bound, times) -> None:
    """Inputs that have most in common, over 3,328 tokens: what `benchmarks.memory_growth` shows at full size.

    DLA grows without the norm, a thousand times as large at least. At this size Titans does not; at full size it does.
    """
    sizes = {}
    for norm in (True, False):
        memory = {"kind": kind, "inner_chunk": 16, "layer_norm": norm}
        mixer = {**more, "memory": memory} if more else memory
        model = {"layers": 1, "hidden_size": 64, "heads": 1, "vocab_size": 64, "chunk_size": 256, "mixer": mixer}
        sizes[norm] = memory_growth.grow(parse_config(ModelConfig, model, "model"), share=0.9, tokens=13 * 256)
    assert len(sizes[True]) == 13  # it ends where numbers are not finite
    assert max(size.memory for size in sizes[True]) < bound
    if times is not None:
        assert sizes[False][-1].memory > times * sizes[True][-1].memory
