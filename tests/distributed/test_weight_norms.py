"""The callback `weight_norms`: the norm of every component of the whole model, whatever the layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megamem.training.callbacks.weight_norms import component_of
from tests.distributed.harness import run_distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {
    2: {
        "tp2-zero0": {"parallel": {"tp": 2, "zero_stage": 0}},
        "tp2-bf16": {"parallel": {"tp": 2, "zero_stage": 1}, "training": {"precision": "bf16"}},
        "dp2-zero1": {"parallel": {"zero_stage": 1}},
        "dp2-zero2": {"parallel": {"zero_stage": 2}},
        "dp2-zero3": {"parallel": {"zero_stage": 3}},
        "pp2-tied": {"parallel": {"pp": 2, "zero_stage": 1}, "model": {"tie_embeddings": True}},
    },
    4: {
        "tp2-dp2-zero0": {"parallel": {"tp": 2, "zero_stage": 0}},
        "tp2-dp2-zero3": {"parallel": {"tp": 2, "zero_stage": 3}},
        "pp2-tp2": {"parallel": {"tp": 2, "pp": 2, "zero_stage": 0}},
    },
}


def measure(layouts: dict[str, dict]) -> dict[str, tuple[dict, dict]]:
    """The callback's figures after one step, and those of the gathered weights of this rank's stage."""
    from megamem.parallel.gather import whole_parameter
    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine
    from megamem.training.callbacks.weight_norms import WeightNorms
    from tests.distributed.training_cases import local_batches, run_config

    found = {}
    for name, sections in layouts.items():
        config = run_config(**sections)
        parallel = config.parallel
        topology = Topology.start(parallel.tp, pp=parallel.pp, device="cpu", timeout_s=120)
        engine = build_engine(config, topology)
        engine.step(local_batches(config, topology, 0), 1e-3)
        callback, trainer = WeightNorms(every=2), SimpleNamespace(config=config, topology=topology, engine=engine)
        first, second, third = {"step": 1}, {"step": 2}, {"step": 3}
        for record in (first, second, third):
            callback.at_log(trainer, record)
        assert second == {"step": 2}, "only every second log line has them"
        assert {**third, "step": 1} == first
        squares: dict[str, float] = {}
        for parameter_name, parameter in engine.parameters().items():
            value = whole_parameter(parameter, topology.tp_group).double().square().sum().item()
            component = component_of(parameter_name)
            squares[component] = squares.get(component, 0.0) + value
        found[name] = first, {component: value**0.5 for component, value in squares.items()}
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_norms_are_those_of_the_gathered_weights(world):
    function = "tests.distributed.test_weight_norms:measure"
    ranks = run_distributed(world, function, LAYOUTS[world])
    for name in LAYOUTS[world]:
        figures = [rank[name][0] for rank in ranks]
        assert all(rank == figures[0] for rank in figures), "every rank has the same figures"
        expected = {component: norm for rank in ranks for component, norm in rank[name][1].items()}
        assert figures[0].keys() == {"step", *(f"weight_norm/{component}" for component in expected)}
        for component, norm in expected.items():
            # BF16 weights are rounded by up to 2^-9 of each value, FP32 ones are those that are measured
            tolerance = 2**-9 if "bf16" in name else 1e-6
            assert figures[0][f"weight_norm/{component}"] == pytest.approx(norm, rel=tolerance), (name, component)


def test_components_are_layers_and_the_rest_by_name():
    assert component_of("layers.12.mixer.query.weight") == "layers.12"
    assert component_of("embedding.weight") == "embedding"
