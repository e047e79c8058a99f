"""`megamem plan`, as typed; recorded steps and the pictures of schedules."""

import json
import re
from pathlib import Path

import matplotlib as mpl
import pytest
import typer
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.config.load import load_config
from megamem.config.run import RunConfig
from megamem.costs.flops import flop_costs
from megamem.errors import ConfigError, DataError, MegamemError
from megamem.pipeline.comparison import compare, compare_for
from megamem.pipeline.gantt import MICRO_BATCH_COLORS, draw_schedules, note
from megamem.pipeline.record import read_record, write_record
from megamem.pipeline.schedule import chunk_schedule
from megamem.pipeline.simulate import even_cost, simulate

mpl.use("Agg")
BOOKS = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "books.yaml"


def plan(*arguments):
    result = CliRunner().invoke(app, ["plan", *(str(argument) for argument in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def sizes(stages, micro_batches, chunks, *bptt):
    window = ("--bptt-chunks", *bptt) if bptt else ()
    return ("--stages", stages, "--micro-batches", micro_batches, "--chunks", chunks, *window)


def error(kind, *arguments):
    """The message, checked to be one line: `megamem` prints it behind its name."""
    with pytest.raises(MegamemError) as caught:
        plan(*arguments)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


# figures


def test_the_example_of_the_design_as_json():
    assert json.loads(plan("--schedule", *sizes(8, 8, 16, 16), "--json")) == {
        "stages": 8,
        "micro_batches": 8,
        "chunks": 16,
        "bptt_chunks": 16,
        "bubble": 0.0546875,
        "makespan": 405.0,
        "peak_units": [23, 22, 21, 20, 19, 18, 17, 16],
        "1f1b": {"bubble": 0.875, "makespan": 720.0, "peak_units": [128, 112, 96, 80, 64, 48, 32, 16]},
    }


def test_a_window_is_the_sequence_unless_said():
    default, single = (json.loads(plan("--schedule", *sizes(2, 3, 4, *bptt), "--json")) for bptt in ((), (1,)))
    assert default == json.loads(plan("--schedule", *sizes(2, 3, 4, 4), "--json"))
    assert (default["bptt_chunks"], default["peak_units"]) == (4, [5, 4])
    assert (single["bptt_chunks"], single["peak_units"]) == (1, [2, 1])
    assert single["1f1b"] == default["1f1b"]


def test_table():
    lines = plan("--schedule", *sizes(4, 2, 4)).splitlines()
    assert "4 stages, 2 micro-batches of 4 chunks" in lines[0]
    cells = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if re.search("[│┃]", line)]
    assert cells == [
        ["", "chunk by chunk", "1F1B over whole sequences"],
        ["bubble", "37.5%", "150.0%"],
        ["most chunks in flight, stage 0", "7", "8"],
        ["most chunks in flight, stage 1", "6", "8"],
        ["most chunks in flight, stage 2", "5", "8"],
        ["most chunks in flight, stage 3", "4", "4"],
    ]


def test_a_configuration_says_its_sizes():
    found = json.loads(plan("--schedule", "--json", BOOKS, "parallel.pp=2", "training.batch_tokens=16384"))
    # 2,048 tokens are 8 chunks; 16,384 are 4 micro-batches of 2 rows
    assert [found[name] for name in ("stages", "micro_batches", "chunks", "bptt_chunks")] == [2, 4, 8, 8]
    assert found["peak_units"] == [9, 8]
    assert found["1f1b"]["peak_units"] == [16, 8]
    assert 0 < found["bubble"] < found["1f1b"]["bubble"]


def test_costs_are_those_of_the_layers():
    config = load_config(RunConfig, BOOKS, ["parallel.pp=2", "training.batch_tokens=16384", "parallel.placement=[2,2]"])
    first, last = flop_costs(config.model, 2048).by_stage([2, 2])
    report = compare_for(config)
    assert last > first, "it holds the head: it works all the time that its first sequence is there"
    # of 8 chunks a sequence and 4 sequences; 1e-12: the order of some hundred float64 additions
    assert report.one_f_one_b.makespan == pytest.approx(8 * (first + 4 * last), rel=1e-12)
    busy = 4 * (first + last)
    assert report.one_f_one_b.bubble == pytest.approx(2 * (first + 4 * last) / busy - 1, rel=1e-12)
    assert report.ours.busy(1) == pytest.approx(8 * 4 * last, rel=1e-12)


def test_layers_are_where_the_configuration_places_them():
    spans = [
        json.loads(plan("--schedule", "--json", BOOKS, "parallel.pp=2", f"parallel.placement={counts}"))["makespan"]
        for counts in ("[2,2]", "[3,1]", "flops", "measured")
    ]
    # a head of 4,096 words costs more than a layer and a half of 192: three layers balance one and the head
    assert spans[1] < spans[0]
    assert spans[2] == spans[3] == min(spans)


def test_data_parallel_ranks_share_the_micro_batches():
    batch = (BOOKS, "parallel.pp=2", "training.batch_tokens=16384")
    assert [
        json.loads(plan("--schedule", "--json", *batch, *dp))["micro_batches"] for dp in ((), ("--dp", 2), ("--dp", 4))
    ] == [4, 2, 1]
    assert "4 data-parallel ranks; use a multiple of 8" in error(ConfigError, "--schedule", BOOKS, "--dp", 4)


def test_the_configuration_s_data_parallel_size_counts():
    given = ("parallel.pp=2", "training.batch_tokens=16384", "parallel.dp=2")
    assert json.loads(plan("--schedule", "--json", BOOKS, *given))["micro_batches"] == 2


def test_both_schedules_do_the_same_work():
    """With costs that differ by stage and chunk; only the idle time differs."""
    overrides = ["parallel.pp=3", "model.mixer=full_attention", "training.batch_tokens=16384"]
    report = compare_for(load_config(RunConfig, BOOKS, overrides))
    for stage in range(3):
        # 1e-12: the order of some hundred float64 additions
        assert report.ours.busy(stage) == pytest.approx(report.one_f_one_b.busy(stage), rel=1e-12)
    assert report.ours.makespan < report.one_f_one_b.makespan


def test_one_chunk_per_sequence_is_1f1b_itself():
    report = compare(3, 4, 1, 1, even_cost(1, 3))
    assert report.ours == report.one_f_one_b
    assert report.peaks() == report.one_f_one_b_peaks() == [3, 2, 1]


# layouts


def test_bytes_of_every_layout_as_json_and_as_a_table():
    """The recipe has 6 heads: 4 and 8 ranks cannot share them, which is said in their rows."""
    heads = load_config(RunConfig, BOOKS).model.heads
    found = json.loads(plan("--layouts", "--json", BOOKS))["layouts"]
    assert [(row["tp"], row["pp"]) for row in found] == [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4)]
    for row in found:
        assert ("error" in row) == bool(heads % row["tp"])
        assert "error" in row or row["total"] == sum(row[p] for p in ("weights", "gradients", "optimizer", "states"))
    assert f"cannot share model.heads {heads} evenly" in plan("--layouts", BOOKS)


def test_layouts_are_those_of_the_configuration_s_data_parallel_ranks():
    """Optimizer states are divided among them; what is counted undivided is said."""
    alone, eight, given = (
        json.loads(plan("--layouts", "--json", BOOKS, *more))
        for more in ((), ("parallel.dp=8",), ("parallel.dp=8", "--dp", 2))
    )
    assert (alone["dp"], eight["dp"], given["dp"]) == (1, 8, 2)
    whole = alone["layouts"][0]["optimizer"]
    assert [found["layouts"][0]["optimizer"] for found in (eight, given)] == [-(-whole // 8), -(-whole // 2)]


# refusals

NEEDED = "give a configuration or --stages, --micro-batches and --chunks"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "plan: nothing to plan; give a configuration, or --schedule and sizes"),
        (sizes(2, 2, 2), "plan: nothing to plan; give a configuration, or --schedule and sizes"),
        (("--schedule",), f"plan: --stages is missing; {NEEDED}"),
        (("--schedule", "--micro-batches", 2, "--chunks", 2), f"plan: --stages is missing; {NEEDED}"),
        (("--schedule", "--stages", 2, "--chunks", 2), f"plan: --micro-batches is missing; {NEEDED}"),
        (("--schedule", "--stages", 2, "--micro-batches", 2), f"plan: --chunks is missing; {NEEDED}"),
        (("--schedule", *sizes(2, 2, 4, 3)), "plan: bptt_chunks 3 does not divide 4 chunks"),
        (("--schedule", *sizes(2, 2, 4, 8)), "plan: bptt_chunks 8 does not divide 4 chunks"),
        (("--schedule", BOOKS, "--stages", 2), "plan: --stages does not go with a configuration"),
        (("--schedule", BOOKS, "--micro-batches", 2), "plan: --micro-batches does not go with a configuration"),
        (("--schedule", BOOKS, "--chunks", 2), "plan: --chunks does not go with a configuration"),
        (("--schedule", BOOKS, "--bptt-chunks", 2), "plan: --bptt-chunks does not go with a configuration"),
        (("--layouts",), "plan: --layouts goes with a configuration, --dp and --json"),
        (("--layouts", "--chunks", 2, BOOKS), "plan: --layouts goes with a configuration, --dp and --json"),
        (("--layouts", "--schedule", BOOKS), "plan: --layouts goes with a configuration, --dp and --json"),
        (("--schedule", *sizes(2, 2, 2), "--recorded", "x"), "plan: --recorded RUN is drawn; give --draw-schedule"),
        (("--draw-schedule", "", BOOKS), "plan: --draw-schedule names no file; give FILE.png"),
        (("--schedule", "nowhere.yaml"), "nowhere.yaml: no such configuration file"),
        (("--schedule", BOOKS, "parallel.pp=5"), "parallel.pp 5 is more than the 4 layers of the model"),
    ],
)
def test_refusals(arguments, said):
    assert said in error(ConfigError, *arguments)


@pytest.mark.parametrize("option", ["--stages", "--micro-batches", "--chunks", "--bptt-chunks", "--dp"])
def test_sizes_are_positive(option):
    result = CliRunner().invoke(app, ["plan", "--schedule", option, "0"])
    assert result.exit_code == 2
    assert option in result.output


def test_every_option_has_help():
    command = typer.main.get_command(app).commands["plan"]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name


# pictures


def pixels(path, color):
    """How many pixels of a picture have exactly this color."""
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = imread(path)[..., :3]
    assert min(picture.shape[:2]) > 200
    return int((abs(picture - to_rgb(color)) < 1 / 512).all(axis=-1).sum())


def test_a_picture_is_drawn(tmp_path):
    path = tmp_path / "new" / "picture.png"
    output = plan("--draw-schedule", path, *sizes(2, 2, 2))
    assert "bubble" in output
    assert f"picture: {path}" in output.replace("\n", "")
    # a color per micro-batch, and none for a third
    areas = [pixels(path, color) for color in MICRO_BATCH_COLORS[:3]]
    assert min(areas[:2]) > 1000
    assert areas[2] == 0


def test_the_picture_s_name_is_in_the_json(tmp_path):
    path = tmp_path / "picture.png"
    assert json.loads(plan("--draw-schedule", path, *sizes(2, 1, 2), "--json"))["picture"] == str(path)
    assert path.is_file()


def test_other_formats_are_chosen_by_suffix(tmp_path):
    path = tmp_path / "picture.svg"
    plan("--draw-schedule", path, *sizes(2, 1, 2))
    assert "<svg" in path.read_text(encoding="utf-8")


def test_a_format_that_cannot_be_drawn_is_refused(tmp_path):
    assert "picture.docx" in error(ConfigError, "--draw-schedule", tmp_path / "picture.docx", *sizes(2, 1, 2))


def test_the_picture_is_where_the_command_says(tmp_path):
    figures = json.loads(plan("--draw-schedule", tmp_path / "picture", *sizes(2, 1, 2), "--json"))
    assert Path(figures["picture"]).is_file()


@pytest.mark.parametrize(("micro_batches", "bars", "numbered"), [(5, 160, True), (6, 192, False)])
def test_many_bars_are_drawn_without_numbers(tmp_path, micro_batches, bars, numbered):
    """Numbers on thin bars would run into each other. An SVG names the texts it draws in comments."""
    timeline = simulate(chunk_schedule(2, micro_batches, 8, 8), 8)
    assert len(timeline.events) == bars
    path = tmp_path / "picture.svg"
    draw_schedules({"title": timeline}, {"title": "a note"}, path)
    text = path.read_text(encoding="utf-8")
    assert "<!-- title: a note -->" in text
    numbers = {chunk: text.count(f"<!-- {chunk} -->") for chunk in range(1, 8)}
    assert numbers == dict.fromkeys(range(1, 8), bars // 8 if numbered else 0)


def test_note():
    assert note(0.0546875, [23, 8]) == "bubble 5.5%, most chunks in flight by stage 23, 8"


# recorded steps


@pytest.fixture
def timeline():
    """As the clock of a host says it: seconds since 1970."""
    found = simulate(chunk_schedule(2, 1, 2, 2), 2, even_cost(0.001, 0.002))
    events = [type(e)(e.stage, e.action, 1.7e9 + e.start, 1.7e9 + e.end) for e in found.events]
    return type(found)(2, tuple(events))


@pytest.fixture
def recorded(tmp_path, timeline):
    folder = tmp_path / "run"
    folder.mkdir()
    for stage in range(2):
        write_record(folder, stage, 2, [event for event in timeline.events if event.stage == stage])
    return folder


def test_records_round_trip(recorded, timeline):
    assert sorted(path.name for path in recorded.iterdir()) == ["schedule-stage0.json", "schedule-stage1.json"]
    found = read_record(recorded)
    assert found.stages == 2
    assert len(found.events) == len(timeline.events) == 8
    assert set(found.events) == set(timeline.events)
    assert found.bubble == timeline.bubble


def test_a_recorded_step_is_drawn(tmp_path, recorded):
    picture = tmp_path / "picture.png"
    plan("--draw-schedule", picture, "--recorded", recorded, *sizes(2, 2, 2))
    # it has one micro-batch, the plan beside it two
    own = tmp_path / "picture-recorded.png"
    assert pixels(own, MICRO_BATCH_COLORS[0]) > 1000
    assert pixels(own, MICRO_BATCH_COLORS[1]) == 0
    assert pixels(picture, MICRO_BATCH_COLORS[1]) > 1000


def test_a_run_without_a_record(tmp_path):
    picture = tmp_path / "picture.png"
    said = error(DataError, "--draw-schedule", picture, "--recorded", tmp_path, *sizes(2, 1, 2))
    assert said.startswith(f"{tmp_path / 'schedule-stage0.json'}: no recorded step")
    assert "logging.record_step" in said
    assert not picture.exists()


def test_a_missing_stage_is_named(tmp_path, recorded):
    (recorded / "schedule-stage1.json").unlink()
    with pytest.raises(DataError, match=r"schedule-stage1\.json: not a readable record of a stage") as caught:
        read_record(recorded)
    assert "\n" not in str(caught.value)
    said = error(DataError, "--draw-schedule", tmp_path / "p.png", "--recorded", recorded, *sizes(2, 1, 2))
    assert said == str(caught.value)


DAMAGE = {
    "empty": "",
    "no text": "\udcff\udcfe",
    "other JSON": "[]",
    "no events": '{"stages": 2}',
    "no stages": '{"events": []}',
    "an event too short": '{"stages": 2, "events": [[0, "forward"]]}',
    "an event too long": '{"stages": 2, "events": [[0, "forward", 0, 0, 0, 0.0, 1.0]]}',
}


@pytest.mark.parametrize("damage", ["cut off", *DAMAGE])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_damaged_stage_is_named(recorded, stage, damage):
    path = recorded / f"schedule-stage{stage}.json"
    text = DAMAGE.get(damage, path.read_text(encoding="utf-8")[:-20])
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DataError) as caught:
        read_record(recorded)
    assert str(caught.value).startswith(f"{path}: not a readable record of a stage (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"stages": "2", "events": []}', '{"stages": 1, "events": []}'])
def test_a_record_of_nothing_is_damaged(tmp_path, recorded, text):
    (recorded / "schedule-stage0.json").write_text(text, encoding="utf-8")
    said = error(DataError, "--draw-schedule", tmp_path / "p.png", "--recorded", recorded, *sizes(2, 1, 2))
    assert "schedule-stage0.json" in said


def test_stages_of_different_runs_do_not_go_together(recorded, timeline):
    """Files of a run with four stages and of one with two in one folder."""
    write_record(recorded, 0, 4, [event for event in timeline.events if event.stage == 0])
    with pytest.raises(DataError, match=r"schedule-stage1\.json"):
        read_record(recorded)
