"""Fields given as `auto`: how they are noted, chosen, kept for a run that goes on, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.auto import AUTO_FIELDS, AutoConfig
from megamem.config.load import dump_yaml, load_config, parse_config, read_yaml
from megamem.config.recipe import auto_overrides, load_run
from megamem.config.run import RunConfig
from megamem.config.training import Recompute
from megamem.errors import ConfigError, LayoutError
from megamem.planning.activations import Activations
from megamem.planning.auto import chosen_before, divided, is_open, resolve_auto, resolve_for
from megamem.planning.machines import machine
from megamem.planning.plan import make_plan
from megamem.planning.search import RECOMPUTED
from megamem.runs.folder import create_run_folder
from megamem.training.devices import local_processes, settle

BOOKS = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "books.yaml"
ALL = ("parallel=auto", "training.micro_batch_size=auto", "training.recompute=auto", "training.window_order=auto")
BATCH = "training.batch_tokens=65536"  # 32 sequences
H100 = machine("h100", 8)
SMALL = H100.model_copy(
    update={
        "memory": 0.45e9, "reserve": 0.0, "per_node": 4,
        # launches would decide everything about a model so small
        "reached": H100.reached.model_copy(update={"kernel": 0.0, "launch": 0.0}),
    }
)  # fmt: skip


def books(*overrides: str) -> RunConfig:
    return load_run(BOOKS, [BATCH, *overrides])


# noted


def test_a_validated_run_holds_numbers_and_says_which_are_open() -> None:
    config = books(*ALL)
    assert config.auto == AutoConfig(fields=AUTO_FIELDS)
    parallel, training = config.parallel, config.training
    assert (parallel.tp, parallel.pp, parallel.zero_stage) == (1, 1, 1)
    assert (training.micro_batch_size, training.recompute) == (1, False)
    # the recipe's other keys of the section are still there
    assert (parallel.device, parallel.stall_timeout_s) == ("cpu", 120)
    assert is_open(config, 2)
    assert not is_open(books(), 2)
    assert parse_config(RunConfig, yaml.safe_load(dump_yaml(config)), "saved") == config


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (("parallel=auto", "parallel.tp=2"), ("parallel.pp", "parallel.zero_stage")),
        (("parallel.tp=auto",), ("parallel.tp",)),
        (("parallel=auto", "parallel.device=cpu"), ("parallel.tp", "parallel.pp", "parallel.zero_stage")),
        (("training.recompute=auto", "training.recompute=true"), ()),
    ],
)
def test_a_value_given_by_hand_is_not_open(overrides: tuple[str, ...], fields: tuple[str, ...]) -> None:
    config = books(*overrides)
    assert config.auto.fields == fields
    assert config.parallel.tp == (1 if "parallel.tp" in fields else 2), "the recipe's is 2"
    assert config.training.recompute is ("training.recompute=true" in overrides)


def test_a_file_may_say_parallel_auto_over_its_base(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"base": str(BOOKS), "parallel": "auto"}), encoding="utf-8")
    assert read_yaml(file)["parallel"]["timeout_s"] == 300
    assert load_run(file).auto.fields == ("parallel.tp", "parallel.pp", "parallel.zero_stage")
    # and be a base itself
    above = tmp_path / "above.yaml"
    above.write_text(yaml.safe_dump({"base": "run.yaml", "parallel": {"tp": 2}}), encoding="utf-8")
    assert load_run(above).auto.fields == ("parallel.pp", "parallel.zero_stage")


# chosen


def test_the_choice_fits_with_room_and_no_faster_layout_is_left() -> None:
    config = books(*ALL)
    activations = Activations(config.model, "fp32", config.chunks)
    found = resolve_auto(config, 4, SMALL, activations)
    assert found.auto == AutoConfig(fields=AUTO_FIELDS, devices=4)
    dp_size = 4 // found.parallel.tp // found.parallel.pp
    plan = make_plan(found, dp_size, SMALL, activations=activations.of_phase(found))
    assert plan.total <= 0.95 * SMALL.usable
    # with all memory in the world: plain data parallelism, all 8 rows of a rank at once
    large = resolve_auto(config, 4, SMALL.model_copy(update={"memory": 1e15}), activations)
    parallel = large.parallel
    assert (parallel.tp, parallel.pp, large.training.micro_batch_size, large.training.recompute) == (1, 1, 8, False)
    assert large.training.micro_batch_size > found.training.micro_batch_size
    # nothing else of the run has changed
    assert (
        large.model_copy(update={"auto": config.auto, "parallel": config.parallel, "training": config.training})
        == config
    )
    assert large.bptt_chunks == config.bptt_chunks


def test_only_open_fields_are_chosen_and_the_choice_is_the_same_every_time() -> None:
    config = books("parallel.tp=2", "training.micro_batch_size=auto", "training.bptt_chunks=2")
    first, second = (resolve_auto(config, 4, machine("h100", 4)) for _ in range(2))
    assert first == second
    assert (first.parallel.tp, first.bptt_chunks, first.training.micro_batch_size) == (2, 2, 16)


def test_a_given_data_parallel_size_is_kept() -> None:
    found = resolve_auto(books(*ALL, "parallel.dp=2"), 4, machine("h100", 4))
    assert found.parallel.tp * found.parallel.pp == 2
    assert found.parallel.dp == 2


def test_it_is_chosen_anew_for_another_number_of_devices_only() -> None:
    chosen = resolve_for(books(*ALL), 4, "h100")
    assert resolve_for(chosen, 4, "h100") is chosen
    other = resolve_for(chosen, 16, "h100")
    assert other.auto.devices == 16
    assert other.training.micro_batch_size * 16 <= 32 * other.parallel.tp * other.parallel.pp


def test_overrides_give_ranks_the_choice() -> None:
    chosen = resolve_auto(books(*ALL), 4, machine("h100", 4))
    assert load_run(BOOKS, [BATCH, *ALL, *auto_overrides(chosen)]) == chosen
    assert auto_overrides(books()) == []


def test_a_hand_set_value_of_a_saved_run_is_kept_on_other_devices(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_yaml(resolve_auto(books(*ALL), 4, machine("h100", 4))), encoding="utf-8")
    again = load_run(saved, ["training.micro_batch_size=1"])
    assert "training.micro_batch_size" not in again.auto.fields
    assert resolve_auto(again, 2, machine("h100", 2)).training.micro_batch_size == 1


# a run that goes on


def test_a_run_that_goes_on_keeps_its_numbers(tmp_path: Path) -> None:
    config = books(*ALL, "training.window_order=chunks", f"runs_folder={tmp_path}")
    first = settle(config, 2)
    # as another release of the planner might have chosen
    other = first.model_copy(update={"training": first.training.model_copy(update={"micro_batch_size": 2})})
    assert other != first
    create_run_folder(other)
    assert load_config(RunConfig, tmp_path / "books" / "config.yaml") == other
    longer = config.model_copy(update={"training": config.training.model_copy(update={"steps": 500})})
    assert settle(longer, 2).training.micro_batch_size == 2
    assert settle(longer, 2).steps == 500
    assert settle(config, 4).auto.devices == 4, "other devices: chosen anew"
    wider = config.model_copy(update={"training": config.training.model_copy(update={"batch_tokens": 131072})})
    assert chosen_before(wider, other, 2) is None, "another batch: chosen anew"
    narrower = config.model_copy(update={"training": config.training.model_copy(update={"batch_tokens": 2048})})
    assert chosen_before(narrower, other, 2) is None, "a batch that the numbers do not even divide, too"
    ordered = config.model_copy(update={"training": config.training.model_copy(update={"window_order": "layers"})})
    assert chosen_before(ordered, other, 2) is None, "other times and bytes: chosen anew"


def test_a_folder_that_cannot_be_read_is_no_choice(tmp_path: Path) -> None:
    config = books(*ALL, f"runs_folder={tmp_path}")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "config.yaml").write_text("name: [", encoding="utf-8")
    assert settle(config, 2).auto.devices == 2


def test_processes_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_processes(books(*ALL)) == 1, "ranks on the CPU"
    assert local_processes(books()) == 2
    assert local_processes(books("training.recompute=auto")) == 2
    assert local_processes(books("parallel=auto", "parallel.dp=3")) == 3
    assert local_processes(books("parallel=auto", "parallel.tp=2")) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_processes(books(*ALL)) == 1, "parallel.device is cpu"
    assert local_processes(books(*ALL, "parallel.device=null")) == 4


def test_any_layout_stands_for_what_is_not_chosen_yet() -> None:
    assert divided(books("parallel=auto", "training.micro_batch_size=8"), 8).parallel.tp == 2, "4 rows a rank at TP 1"
    config = books()
    assert divided(config, 3) is config


def in_two_phases(*overrides: str) -> RunConfig:
    """3 sequences of a step, then 4 longer ones: only micro-batches of one sequence on one rank divide both."""
    later = "training.phases=[{from_step: 3, sequence_length: 4096, batch_tokens: 16384}]"
    return books("parallel.tp=1", "training.batch_tokens=6144", "training.micro_batch_size=auto", later, *overrides)


def test_what_is_chosen_divides_the_batches_of_all_phases() -> None:
    """Of the 4 longer sequences alone 4 would be read at once, or one on each of 4 devices."""
    config = in_two_phases()
    assert [phase.global_rows for phase in config.phases] == [3, 4]
    h100 = machine("h100", 4)
    for found in (divided(config, 1), resolve_auto(config, 1, h100)):
        assert found.training.micro_batch_size == 1
    for found in (divided(in_two_phases("parallel=auto"), 4), resolve_auto(in_two_phases("parallel=auto"), 4, h100)):
        assert found.parallel.tp * found.parallel.pp == 4
    with pytest.raises(LayoutError, match=r"no layout divides the model and the 3 and 4 sequences of a step") as caught:
        resolve_auto(config, 2, h100)
    assert "\n" not in str(caught.value)


# the command


def test_plan_shows_what_is_chosen() -> None:
    arguments = ["plan", str(BOOKS), BATCH, *ALL, "--devices", "4"]
    shown = CliRunner().invoke(app, arguments)
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    layout = found["layout"]
    said = f"auto: parallel.tp={layout['tp']} parallel.pp={layout['pp']} parallel.zero_stage={layout['zero_stage']}"
    assert said in shown.stdout
    # a model so small waits for launches: large micro-batches, and few layers on each device
    assert layout["micro_batch_size"] >= 8
    assert found["devices"] == 4


# refusals


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("parallel=autos",), "parallel: expected a section of keys (got 'autos')"),
        (("training.micro_batch_size=atuo",), "training.micro_batch_size: expected an integer (got 'atuo')"),
        (("training.bptt_chunks=auto",), "training.bptt_chunks: expected an integer (got 'auto')"),
        (("training=auto",), "training: expected a section of keys (got 'auto')"),
        (
            ("parallel=auto", "parallel.placement=[2,2]"),
            "parallel.placement [2, 2] gives the layers of each stage, but parallel.pp is auto; give a number",
        ),
        (("auto.fields=[training.steps]",), "auto.fields.0: should be 'parallel.tp'"),
        (("auto.fields=3",), "auto.fields: expected a list"),
        (("auto=3",), "auto: expected a section of keys (got 3)"),
    ],
)
def test_one_line_says_what_is_wrong(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        books(*overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_divides() -> None:
    config = load_run(BOOKS, ["training.batch_tokens=2048", "parallel.zero_stage=auto", "parallel.tp=1",
                             "training.micro_batch_size=1"])  # fmt: skip
    for attempt in (lambda: divided(config, 7), lambda: resolve_auto(config, 7, machine("h100", 7))):
        with pytest.raises(LayoutError) as caught:
            attempt()
        assert str(caught.value) == (
            "parallel.zero_stage: auto, but no layout divides the model and the 1 sequences of a step "
            "(training.batch_tokens) on 7 devices; use another number of devices or another batch"
        )


def test_a_part_of_each_layer_is_computed_again_where_that_is_enough() -> None:
    """Less time than for whole layers; and what was chosen reads back from the run's file."""
    config = books("training.recompute=auto", "training.micro_batch_size=8")
    activations = Activations(config.model, "fp32", config.chunks)
    assert set(RECOMPUTED) == set(get_args(Recompute))
    totals = {
        way: make_plan(books(f"training.recompute={way}", "training.micro_batch_size=8"), 1, SMALL, activations).total
        for way in ("false", "mlp", "true")
    }
    assert totals["true"] < totals["mlp"] < totals["false"]
    room = SMALL.model_copy(update={"memory": 1.06 * totals["mlp"]})
    found = resolve_auto(config, 2, room, activations)
    assert found.training.recompute == "mlp"
    assert parse_config(RunConfig, yaml.safe_load(dump_yaml(found)), "saved") == found


ORDER = ("training.window_order=auto", "parallel.tp=1", "model.chunk_size=128")


def test_windows_are_read_by_layer_where_that_takes_no_longer() -> None:
    """A model so small waits for launches, of which a window that is read by layer has fewer."""
    config = books(*ORDER)
    assert config.training.window_order == "chunks", "until it is chosen"
    found = resolve_auto(config, 2, H100)
    assert found.training.window_order == "layers"
    seconds = {
        order: make_plan(books(*ORDER, f"training.window_order={order}"), 2, H100).time.total
        for order in ("chunks", "layers")
    }
    assert seconds["layers"] < seconds["chunks"]
    assert parse_config(RunConfig, yaml.safe_load(dump_yaml(found)), "saved") == found
    # the logits of a window are too many to be kept and are computed twice: slower, where launches cost nothing
    reached = H100.reached.model_copy(update={"kernel": 0.0, "launch": 0.0})
    many = books(*ORDER, "model.chunk_size=1024", "model.vocab_size=50000", "training.micro_batch_size=1")
    slower = resolve_auto(many, 2, H100.model_copy(update={"reached": reached}))
    assert slower.training.window_order == "chunks"


def test_an_order_that_was_chosen_is_chosen_anew_for_other_devices() -> None:
    """A saved `layers` would leave no pipeline to try."""
    config = books(*ORDER, "parallel.pp=auto")
    saved = resolve_auto(config, 2, H100)
    assert (saved.training.window_order, saved.auto.devices) == ("layers", 2)
    assert resolve_auto(saved, 4, H100) == resolve_auto(config, 4, H100)
    # 32 sequences divide over 64 devices with stages only
    assert divided(saved, 64).parallel.pp > 1


def test_a_pipeline_and_side_rows_keep_windows_by_chunk() -> None:
    assert resolve_auto(books(*ORDER, "parallel.pp=2"), 2, H100).training.window_order == "chunks"
    refused = books(*ORDER, "model.mixer=lamemo")
    assert resolve_auto(refused, 2, H100).training.window_order == "chunks"


def test_nothing_fits() -> None:
    with pytest.raises(LayoutError) as caught:
        resolve_auto(books("training.recompute=auto"), 2, SMALL.model_copy(update={"memory": 1e6}))
    said = str(caught.value)
    assert said.startswith(
        "training.recompute: auto, but no layout fits into 2 x H100 80GB HBM3: of 4 that were tried, "
    )
    assert "training.recompute=true" in said
    assert "\n" not in said
    smallest = resolve_auto(
        books("training.recompute=auto"), 2, SMALL.model_copy(update={"memory": 1e6}), must_fit=False
    )
    assert smallest.training.recompute
