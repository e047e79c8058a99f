"""Every 760M and 1.3B model starts on 8, 32 and 64 devices of 80 GB, and all of a recipe's models read the same text.

Measuring what a model keeps takes a second or more, deciding about a number of devices some hundredths: all but a few
models that are hard to fit wait for the slow tests.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from megamem.config.run import RunConfig
from megamem.errors import LayoutError
from megamem.hardware import cores
from megamem.pipeline.balancing import place
from megamem.planning.activations import Activations
from megamem.planning.auto import divided, resolve_auto
from megamem.planning.machines import machine
from megamem.planning.plan import rank_reports
from megamem.planning.step_time import Layout
from megamem.training.checks import check_layout
from tests.unit.shipped import SHIPPED, shipped

DEVICES = (8, 32, 64)
HARDEST = ("transformer-1.3b", "dla-log-linear-1.3b")
"""Those that keep much for a backward pass, each in another way."""
LARGE = sorted(name for name in SHIPPED if name.endswith(("760m", "1.3b")))


def test_the_hardest_are_shipped() -> None:
    assert set(HARDEST) <= set(LARGE)


@lru_cache(maxsize=1)
def measured(name: str) -> tuple[RunConfig, Activations]:
    """A run and what measures it, which its three numbers of devices share."""
    config = shipped(name)
    # where torch sees a CUDA device, a process that has run a backward pass cannot be forked
    processes = 1 if torch.cuda.is_available() else cores()
    return config, Activations.of_run(config, processes)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in HARDEST else pytest.mark.slow) for name in LARGE]
)
def test_it_fits(name: str, devices: int) -> None:
    config, activations = measured(name)
    device = machine("h100", devices)
    found = resolve_auto(config, devices, device, activations)
    dp_size = check_layout(found, devices)
    assert found.accumulation_steps(dp_size) * found.training.micro_batch_size * dp_size == 128, "the paper's batch"
    ranks = rank_reports(Layout(found, dp_size, tuple(place(found))), activations)
    assert max(rank.total for rank in ranks) <= 0.95 * device.usable


@pytest.mark.parametrize("size", ["760m", "1.3b"])
def test_baseline_and_memories_read_equal_text(size: str) -> None:
    configs = {name: shipped(name) for name in LARGE if name.endswith(size)}
    assert any("transformer" in name for name in configs)
    read = {
        (config.data.model_dump_json(), config.training.batch_tokens, config.training.tokens, config.model.vocab_size)
        for config in configs.values()
    }
    assert len(read) == 1


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - set(LARGE)))
def test_smaller_models_divide_too(name: str) -> None:
    for devices in DEVICES:
        found = divided(shipped(name), devices)
        assert check_layout(found, devices) * found.parallel.tp * found.parallel.pp == devices
    message = f"auto, but no layout divides the model and the {shipped(name).global_rows} sequences of a step"
    with pytest.raises(LayoutError, match=message):
        divided(shipped(name), 17 * 13)
