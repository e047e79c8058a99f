"""The figures `memory_rms/...`: how large each layer's memory is, whatever the layout."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from tests.distributed.harness import run_distributed

pytestmark = pytest.mark.distributed

LAYOUTS = {
    2: {
        "tp2": {"parallel": {"tp": 2, "zero_stage": 1}},
        "dp2-zero3": {"parallel": {"zero_stage": 3}},
        "pp2": {"parallel": {"pp": 2, "zero_stage": 1}},
    },
}


def measure(layouts: dict[str, dict]) -> dict[str, tuple[dict, dict]]:
    """The callback's figures after a step, and those of the states that the engine carries to the next one."""
    from megamem.parallel.topology import Topology
    from megamem.pipeline.engine import build_engine
    from megamem.training.callbacks.memory_sizes import MemorySizes
    from tests.distributed.training_cases import layers_of, local_batches, run_config

    found = {}
    model = layers_of(["delta_net", "local_attention", "infini_attention", "memory_caching"])
    for name, sections in layouts.items():
        config = run_config(model=model, data={"feeding": "streams", "documents": "pad"}, **sections)
        parallel = config.parallel
        topology = Topology.start(parallel.tp, pp=parallel.pp, device="cpu", timeout_s=120)
        engine = build_engine(config, topology)
        callback = MemorySizes(config.model.component_specs(), every=2)
        trainer = SimpleNamespace(
            config=config, topology=topology, engine=engine, step=1, phase=SimpleNamespace(end=10)
        )
        callback.after_step(trainer, None)  # the next step has a log line
        engine.step(local_batches(config, topology, 0), 1e-3)
        trainer.step, record = 2, {}
        callback.at_log(trainer, record)
        callback.after_step(trainer, None)
        assert engine.observe_states is None, "step 3 has no log line"
        expected = {}
        last = engine.carried[max(engine.carried)]
        for component, state in last.items():
            specs = config.model.component_specs()[component]
            flat = [(spec, state[key]) for key, spec in specs.items() if key in state]
            tensors = [tensor for spec, tensor in flat if getattr(spec, "dtype", "") == "float32"]
            for spec, entries in flat:
                if isinstance(entries, list):
                    tensors += [
                        entry[part] for entry in entries for part in entry if spec.entry[part].dtype == "float32"
                    ]
            sizes = [math.sqrt(sum(x * x for x in t.flatten().tolist()) / t.numel()) for t in tensors if t.numel()]
            if sizes:
                expected[f"memory_rms/{component}"] = max(sizes)
        found[name] = record, expected
    return found


@pytest.mark.parametrize("world", LAYOUTS)
def test_sizes_are_those_of_the_states_that_are_carried_on(world):
    function = "tests.distributed.test_memory_sizes:measure"
    ranks = run_distributed(world, function, LAYOUTS[world])
    for name in LAYOUTS[world]:
        figures = [rank[name][0] for rank in ranks]
        assert all(rank == figures[0] for rank in figures), "every rank has the same figures"
        expected: dict[str, float] = {}
        for rank in ranks:
            for component, size in rank[name][1].items():
                expected[component] = max(expected.get(component, 0.0), size)
        assert figures[0].keys() == expected.keys() == {f"memory_rms/layers.{layer}" for layer in (0, 2, 3)}
        for component, size in expected.items():
            assert size > 0
            # sums of some thousand squares in float32
            assert figures[0][component] == pytest.approx(size, rel=1e-5), (name, component)
