"""A run that does not fit into its devices is refused in one line, before anything is built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launchers.launch import load_launch
from megamem.config.recipe import load_run
from megamem.config.run import RunConfig
from megamem.errors import ConfigError, LayoutError
from megamem.planning.activations import Activations
from megamem.planning.fit import check_memory, largest_part
from megamem.planning.machines import Machine, machine, machine_like
from megamem.planning.plan import make_plan
from megamem.training import devices
from megamem.training.devices import settle

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ROOT / "configs" / "recipes" / "books.yaml"
CLUSTER = ROOT / "configs" / "clusters" / "slurm.yaml"
LARGE = machine("h100", 8).model_copy(update={"memory": 1e12, "reserve": 0.0})
GIB = 2**30


def books(*overrides: str) -> RunConfig:
    return load_run(BOOKS, ["parallel.tp=1", "training.batch_tokens=65536", "training.micro_batch_size=8", *overrides])


def refusal(config: RunConfig, dp_size: int, memory: float, activations: Activations | None = None) -> str:
    """The message, checked to be one line."""
    with pytest.raises(LayoutError) as caught:
        check_memory(config, dp_size, LARGE.model_copy(update={"memory": memory}), activations)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_line_names_the_bytes_the_part_and_two_remedies_that_work() -> None:
    config = books()
    activations = Activations(config.model, "fp32", config.chunks)
    plan = make_plan(config, 4, LARGE, activations=activations)
    memory = 0.8 * plan.total
    said = refusal(config, 4, memory, activations)
    rank = max(plan.ranks, key=lambda rank: rank.total)
    assert rank.peak.in_flight > plan.total / 2
    size, kept = (f"{number / GIB:.1f}" for number in (plan.total, rank.peak.in_flight))
    assert said.startswith(
        f"books does not fit: the fullest rank needs {size} GiB, {kept} GiB of it activations kept for the backward, "
        f"and H100 80GB HBM3 has {memory / GIB:.1f} GiB to use; cheapest remedies: "
    )
    assert said.endswith("; parallel.check_memory=false starts anyway")
    remedies = re.findall(r"([a-z_.]+=\w+(?: [a-z_.]+=\w+)*) \(([\d.]+) GiB, ([\d.]+) s a step\)", said)
    assert len(remedies) == 2
    times = []
    for overrides, bytes_, seconds in remedies:
        changed = books(*overrides.split())
        dp_size = 4 // changed.parallel.tp // changed.parallel.pp
        remedied = make_plan(changed, dp_size, LARGE, activations=activations)
        assert remedied.total <= memory
        assert f"{remedied.total / GIB:.1f}" == bytes_
        assert f"{remedied.time.total:.2f}" == seconds
        times.append(remedied.time.total)
    assert times == sorted(times)


def test_what_fits_says_nothing() -> None:
    config = books()
    activations = Activations(config.model, "fp32", config.chunks)
    total = make_plan(config, 4, LARGE, activations=activations).total
    check_memory(config, 4, LARGE.model_copy(update={"memory": total}), activations)
    assert "does not fit" in refusal(config, 4, total - 1, activations)


def test_where_no_single_change_is_enough_several_are_named() -> None:
    config = books("training.batch_tokens=16384")  # 8 sequences
    activations = Activations(config.model, "fp32", config.chunks)
    recomputed = books("training.batch_tokens=16384", "training.recompute=true", "training.micro_batch_size=1")
    memory = 1.02 * make_plan(recomputed, 1, LARGE, activations=activations).total
    said = refusal(config, 1, memory, activations)
    assert "training.micro_batch_size=1 training.recompute=true (" in said


def test_where_nothing_helps_the_least_is_named() -> None:
    said = refusal(books(), 2, 1e6)
    assert re.search(
        r"; of \d+ that were tried, parallel.pp=\d .* needs least, [\d.]+ GiB where 0.0 GiB may be used", said
    )


def test_the_largest_part_has_a_name() -> None:
    config = books("training.recompute=true", "training.micro_batch_size=1")
    (rank,) = make_plan(config, 1, LARGE).ranks
    name, size = largest_part(rank)
    assert (name, size) == ("optimizer states", rank.held.optimizer)


# devices


def test_a_device_that_is_known_by_its_name() -> None:
    found = machine_like("NVIDIA H100 80GB HBM3", 85.0e9, 4)
    assert found == machine("h100", 8).model_copy(update={"memory": 85.0e9, "per_node": 4})


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Some Device"])
def test_a_device_that_is_not_known_has_its_own_memory(name: str) -> None:
    found = machine_like(name, 10e9, 1)
    assert (found.name, found.memory, found.usable) == (name, 10e9, 7.5e9)
    assert found.peak("bf16") > 0


# where it is compared


def test_ranks_on_cuda_are_compared_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = books("parallel.device=null")
    asked = []

    def small(per_node: int) -> Machine:
        asked.append(per_node)
        return LARGE.model_copy(update={"memory": 1e9})

    monkeypatch.setattr(devices, "cuda_machine", small)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 4)
    with pytest.raises(LayoutError, match="books does not fit"):
        settle(config, 4)
    assert asked == [4]
    assert settle(config, 4, check=False) is config
    anyway = books("parallel.device=null", "parallel.check_memory=false")
    assert settle(anyway, 4) is anyway
    cpu = books("parallel.device=cpu")
    assert settle(cpu, 4) is cpu
    assert asked == [4]


def test_every_phase_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "training.phases=[{from_step: 10, sequence_length: 4096}]"
    config = books("parallel.device=null", "training.micro_batch_size=2", later)
    first, second = config.phases
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)
    totals = [make_plan(phase, 2, LARGE).total for phase in (first, second)]
    assert totals[1] > 1.3 * totals[0], "twice as many chunks are kept"
    small = LARGE.model_copy(update={"memory": 1.05 * totals[0]})
    assert settle(config.phases[0], 2, device=small) == first
    with pytest.raises(LayoutError, match=r"^training.phases.0: books does not fit: the fullest rank needs "):
        settle(config, 2, device=small)
    open_ = books("parallel.device=null", "training.micro_batch_size=auto", later)
    found = settle(open_, 2, device=LARGE.model_copy(update={"memory": 0.9 * totals[1]}))
    assert found.training.micro_batch_size == 1, "the longest sequences decide"


def test_launch_compares_with_the_cluster_s_device() -> None:
    overrides = ["parallel.tp=1", "parallel.device=null", "training.batch_tokens=8388608"]
    overrides += ["training.micro_batch_size=128", "data.sequence_length=16384"]
    with pytest.raises(ConfigError) as caught:
        load_launch(BOOKS, overrides, CLUSTER, "slurm")
    assert str(caught.value).startswith("nodes 4 x processes_per_node 8: training.batch_tokens: 512 sequences")
    overrides = ["parallel.tp=1", "parallel.device=null", "training.batch_tokens=67108864"]
    overrides += ["training.micro_batch_size=128", "data.sequence_length=16384"]
    with pytest.raises(ConfigError) as caught:
        load_launch(BOOKS, overrides, CLUSTER, "slurm")
    said = str(caught.value)
    assert said.startswith("nodes 4 x processes_per_node 8: books does not fit: the fullest rank needs ")
    assert "\n" not in said
    assert load_launch(BOOKS, [*overrides, "device=null"], CLUSTER, "slurm").job.node_counts == (4,)
    assert load_launch(BOOKS, [*overrides, "parallel.check_memory=false"], CLUSTER, "slurm").job.node_counts == (4,)
    fits = load_launch(BOOKS, [*overrides, "training.micro_batch_size=auto"], CLUSTER, "slurm")
    assert fits.config.auto.devices == 32
    assert 1 < fits.config.training.micro_batch_size < 128


def test_launch_leaves_auto_to_the_ranks_where_the_devices_are_not_known() -> None:
    overrides = ["parallel=auto", "parallel.device=null", "training.batch_tokens=131072", "device=null"]
    planned = load_launch(BOOKS, [*overrides, "min_nodes=1"], CLUSTER, "slurm")
    # 32 micro-batches of 2 sequences on 8, 16 or 32 ranks; on 24 with TP 3
    assert planned.job.node_counts == (1, 2, 3, 4)
    assert planned.config.auto.devices is None
    with pytest.raises(ConfigError, match=r"processes_per_node: not given, and parallel.tp or parallel.pp is auto"):
        load_launch(BOOKS, [*overrides, "processes_per_node=null"], CLUSTER, "slurm")
    here = load_launch(BOOKS, ["parallel=auto"], None, "local")
    assert (here.job.processes, here.job.node_counts) == (1, (1,)), "ranks on the CPU"
