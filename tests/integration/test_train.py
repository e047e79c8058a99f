"""`megamem train` on two processes, from the command line to the result; the same run in other layouts and modes."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoints.weights import load_weights
from megamem.config.load import load_config, parse_config
from megamem.config.run import RunConfig
from megamem.errors import DataError
from megamem.model.stage import build_stage
from megamem.parallel.linears import PlainLinears
from megamem.runs.result import read_result
from tests.integration.commands import finish, megamem, run_tree, write_config
from tests.integration.ranks import Job

pytestmark = pytest.mark.distributed

LOGGED = {
    "step", "tokens", "loss", "grad_norm", "lr", "skipped", "tokens_per_second", "tokens_per_second_per_device", "mfu",
    "padding", "data_wait", "memory_gib", "eta_s", "elapsed_s", "memory_rms/layers.1",
}  # fmt: skip
VALIDATED = {"step", "tokens", "val_loss", "val_accuracy", "val_bits_per_byte", "val_beyond_first_chunk_loss"}


def train_all(trees: dict[str, dict]) -> dict[str, dict | None]:
    """On a rank: one run after the other; their results."""
    from megamem.training.train import train

    results = {
        name: train(parse_config(RunConfig, tree, name), Console(file=StringIO())) for name, tree in trees.items()
    }  # fmt: skip
    return {name: None if result is None else result.to_dict() for name, result in results.items()}


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder) if "loss" in record}


def config_of(weights: Path) -> RunConfig:
    return load_config(RunConfig, weights.parent / "config.yaml")


def shard_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Half of it along its declared axis, not yet filled."""
    axis = parameter.info.shard_axis
    values = parameter.detach() if axis is None else parameter.detach().chunk(2, axis)[0]
    shard = torch.nn.Parameter(torch.full_like(values, math.nan))
    shard.info = parameter.info
    return shard


@pytest.fixture(scope="module")
def command(data, tmp_path_factory):
    """The real command: TP 2 on two local processes, every sink, a profile; (folder, exit code, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("command")
    logging = {"wandb": {"mode": "offline"}, "tensorboard": True, "profile_steps": [2, 2]}
    config = write_config(folder / "run.yaml", run_tree(data, folder / "runs", name="tp2", logging=logging))
    code, out, err = finish(megamem("train", str(config), "parallel.tp=2"))
    assert code == 0, err
    return folder / "runs" / "tp2", out, err


@pytest.fixture(scope="module")
def worlds(data, tmp_path_factory):
    """Folder of runs made by one world of each size; the FP32 ones have the same batches and seed as the command's."""
    folder = tmp_path_factory.mktemp("worlds")
    bf16 = {"precision": "bf16"}
    runs = {
        1: {"tp1": {}},
        2: {
            "tp2": {"parallel": {"tp": 2}},
            "dp2": {"training": {"micro_batch_size": 1}},
            "bf16-zero1": {"training": bf16, "parallel": {"tp": 2, "zero_stage": 1}},
            "bf16-zero2": {"training": bf16, "parallel": {"zero_stage": 2}},
            "streams": {
                "parallel": {"tp": 2}, "data": {"feeding": "streams", "documents": "pad"},
                "training": {"bptt_chunks": 2},
            },
        },
    }  # fmt: skip
    figures = {}
    for world, cases in runs.items():
        trees = {name: run_tree(data, folder / "runs", name=name, **sections) for name, sections in cases.items()}
        with Job(folder / f"world{world}", world, train_all, trees) as job:
            figures |= job.results()[0]
            noise = [job.output(rank) for rank in range(world)]
            assert noise == [""] * world
    return folder / "runs", figures


class TestCommand:
    def test_the_last_line_is_the_result(self, command):
        folder, out, _ = command
        figures = json.loads(out.splitlines()[-1])
        assert {
            "val_bits_per_byte", "lzma_bits_per_byte", "tokens_per_second", "steps", "run_dir", "picture",
        } <= figures.keys()  # fmt: skip
        assert figures == json.loads((folder / "result.json").read_text())
        assert read_result(folder).to_dict() == figures
        assert (figures["steps"], Path(figures["run_dir"])) == (6, folder)
        assert figures["tokens_per_second"] > 0
        assert 0 < figures["lzma_bits_per_byte"] < 8
        assert Path(figures["picture"]) == folder / "evaluation.png"
        assert (folder / "evaluation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"picture: {folder / 'evaluation.png'}" in out

    def test_nothing_but_our_own_output(self, command):
        _, out, err = command
        assert err == ""
        for noise in ("Warning", "deepspeed", "DeepSpeed", "[Gloo]", "megatron", "wandb:", "Traceback"):
            assert noise not in out

    def test_the_arithmetic_is_printed(self, command):
        _, out, _ = command
        assert "batch: 512 tokens = 4 sequences of 128 = 1 DP ranks x 2 micro-batches x 2 rows" in out
        assert "layout: TP 2 x DP 1, ZeRO 1, FP32" in out
        assert "6 documents" in out

    def test_each_log_line(self, command):
        folder, _, _ = command
        found = records(folder)
        logged = [record for record in found if "loss" in record]
        assert [record["step"] for record in logged] == [1, 2, 4, 6]
        for record in logged:
            assert record.keys() == LOGGED
            assert record["tokens"] == record["step"] * 512
            assert record["mfu"] is None  # the peak of a CPU is not known
            assert record["skipped"] == 0
            assert 0 < record["memory_rms/layers.1"] < 100
            assert 0 <= record["data_wait"] < 1
            assert math.isfinite(record["loss"])
            assert record["grad_norm"] > 0
            # two ranks, both figures from one measurement
            assert record["tokens_per_second"] == pytest.approx(2 * record["tokens_per_second_per_device"])
        assert logged[-1]["eta_s"] == 0
        # an untrained model gives each of 320 tokens the same chance, within what N(0, 0.02) weights change
        assert logged[0]["loss"] == pytest.approx(math.log(320), abs=0.1)
        assert logged[-1]["loss"] < logged[0]["loss"] - 0.1

    def test_validation(self, command):
        folder, _, _ = command
        validated = [record for record in records(folder) if "val_loss" in record]
        assert [(record["step"], record.keys()) for record in validated] == [(3, VALIDATED), (6, VALIDATED)]

    def test_weights_and_biases_offline(self, command):
        folder, _, _ = command
        (run,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
        assert run.stat().st_size > 0

    def test_tensorboard(self, command):
        folder, _, _ = command
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        shown = {event.step: event.value for event in events.Scalars("loss")}
        assert shown == pytest.approx(losses(folder), rel=1e-6)  # event files hold FP32
        assert [event.step for event in events.Scalars("val_loss")] == [3, 6]

    def test_a_trace_per_rank(self, command):
        folder, _, _ = command
        for rank in range(2):
            trace = json.loads((folder / f"trace-rank{rank}.json").read_text())
            names = {event.get("name") for event in trace["traceEvents"]}
            assert {"aten::mm", "gloo:all_reduce"} <= names

    def test_the_run_can_be_repeated_from_its_folder(self, command):
        folder, _, _ = command
        config = load_config(RunConfig, folder / "config.yaml")
        assert (config.parallel.tp, config.name) == (2, "tp2")
        assert "train" in json.loads((folder / "environment.json").read_text())["command"]


class TestLayouts:
    def test_the_same_seed_gives_the_same_losses_bitwise(self, command, worlds):
        assert losses(command[0]) == losses(worlds[0] / "tp2")

    @pytest.mark.parametrize("other", ["tp2", "dp2"])
    def test_layouts_agree(self, worlds, other):
        one = losses(worlds[0] / "tp1")
        # FP32 sums in another order, carried through 6 AdamW steps
        assert losses(worlds[0] / other) == pytest.approx(one, abs=1e-4)
        figures = worlds[1]
        assert figures[other]["val_loss"] == pytest.approx(figures["tp1"]["val_loss"], abs=1e-4)

    def test_weights_are_whole_whatever_the_layout(self, command, worlds):
        one = load_file(worlds[0] / "tp1" / "model.safetensors")
        for folder in (command[0], worlds[0] / "dp2", worlds[0] / "bf16-zero1", worlds[0] / "bf16-zero2"):
            other = load_file(folder / "model.safetensors")
            assert {name: tensor.shape for name, tensor in other.items()} == {n: t.shape for n, t in one.items()}
            assert all(tensor.dtype == torch.float32 for tensor in other.values())
        with safe_open(command[0] / "model.safetensors", framework="pt") as file:
            said = {"format": "megamem", "dtype": "fp32", "new_parameters": "[]", "parts": "{}"}
            assert said.items() <= file.metadata().items()
            assert len(file.metadata()["tokenizer"]) == 64

    def test_weights_load_into_a_plain_model(self, command):
        folder, _, _ = command
        stage = build_stage(load_config(RunConfig, folder / "config.yaml").model, PlainLinears())
        parameters = dict(stage.named_parameters())
        load_weights(parameters, folder / "model.safetensors")
        saved = load_file(folder / "model.safetensors")
        assert all(torch.equal(parameter, saved[name]) for name, parameter in parameters.items())

    def test_weights_load_into_shards(self, worlds):
        """A rank of a tensor-parallel job takes its part, by the axis declared beside the parameter."""
        path = worlds[0] / "tp1" / "model.safetensors"
        saved = load_file(path)
        for rank in range(2):
            parameters = dict(build_stage(config_of(path).model, PlainLinears()).named_parameters())
            shards = {name: shard_of(parameter) for name, parameter in parameters.items()}
            load_weights(shards, path, tp_size=2, tp_rank=rank)
            for name, shard in shards.items():
                axis = shard.info.shard_axis
                part = saved[name] if axis is None else saved[name].chunk(2, axis)[rank]
                assert torch.equal(shard, part), name

    def test_weights_of_another_model_are_refused(self, worlds, tmp_path):
        path = worlds[0] / "tp1" / "model.safetensors"
        parameters = dict(build_stage(config_of(path).model, PlainLinears()).named_parameters())
        name = next(iter(parameters))
        rest = {n: p for n, p in parameters.items() if n != name}
        for wrong, said in (
            (rest, f"{name} is not in the model"),
            (rest | {name: shard_of(parameters[name])}, f"{name} has shape"),
            (parameters | {"extra": parameters[name]}, "extra is missing"),
        ):
            with pytest.raises(DataError, match=said):
                load_weights(wrong, path)
        (tmp_path / "cut").write_bytes(path.read_bytes()[:1000])
        with pytest.raises(DataError, match="not a readable safetensors file"):
            load_weights(parameters, tmp_path / "cut")
        with pytest.raises(DataError, match="no such weights file"):
            load_weights(parameters, tmp_path / "gone")


class TestModes:
    @pytest.mark.parametrize("name", ["bf16-zero1", "bf16-zero2"])
    def test_bf16_follows_fp32(self, worlds, name):
        exact, found = losses(worlds[0] / "tp1"), losses(worlds[0] / name)
        # BF16 keeps 8 bits: a relative 2^-9 per operation moves a loss of 5.8 nats by a few hundredths at most
        assert found == pytest.approx(exact, abs=0.05)
        assert found != exact
        assert min(found) == 1
        assert found[6] < found[1] - 0.1

    def test_streams(self, worlds):
        found = losses(worlds[0] / "streams")
        assert list(found) == [1, 2, 4, 6]
        assert found[6] < found[1] - 0.1
        assert worlds[1]["streams"]["val_bits_per_byte"] > 0


def test_a_dry_run_takes_a_step_of_each_phase(data, tmp_path):
    phases = "training.phases=[{from_step: 2, sequence_length: 256, micro_batch_size: 1}]"
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs"))
    code, out, err = finish(megamem("train", str(config), phases, "--dry-run", cwd=tmp_path))
    assert code == 0, err
    assert out.count("mock step on 1 process(es)") == 2
    assert out.index("phase 1: sequences of 128 tokens") < out.index("phase 2: sequences of 256 tokens")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_prints_everything_and_writes_nothing(data, tmp_path):
    config = write_config(tmp_path / "run.yaml", run_tree(data, tmp_path / "runs", parallel={"tp": 2}))
    code, out, err = finish(megamem("train", str(config), "optimizer.lr=2e-4", "--dry-run", cwd=tmp_path))
    assert (code, err) == (0, "")
    assert "lr: 0.0002" in out  # the resolved configuration, defaults and overrides included
    assert "max_bad_steps: 5" in out
    assert "parameters: 53,408 (32,928 without embedding and head)" in out
    assert "budget: 6 steps = 3,072 tokens" in out
    (mock,) = [line for line in out.splitlines() if line.startswith("mock step on 2 process(es): loss ")]
    # random tokens: ln 320 nats, within what N(0, 0.02) weights change
    assert float(mock.split("loss ")[1].split()[0]) == pytest.approx(math.log(320), abs=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
