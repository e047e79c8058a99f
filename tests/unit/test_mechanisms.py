"""What holds for every registered mechanism beyond the laws of `tests/contract`: its gates, and who owns parameters."""

import pytest
import torch
from torch import nn

from megamem.config.load import parse_config
from megamem.config.model import MIXERS, ModelConfig
from megamem.hf.importing import with_closed_gates
from megamem.memory.base import Mixer
from megamem.memory.shared.gate import MemoryGate
from megamem.model.layer import Layer
from megamem.model.stage import Stage, meta_stage
from megamem.parallel.linears import info
from tests.contract.cases import ALL_CASES

GATED = {"infini_attention", "infinity_former", "memorizing_attention", "melodi"}
CLOSED = -6.0
each_case = pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)


def model_of(case, mixer):
    """The case's model with `mixer` in both of its layers, one of them listed in `memory`."""
    section = case.model(layers=2).model_dump(mode="json")
    return parse_config(ModelConfig, {**section, "mixer": mixer, "memory": [{"layers": [1], "mixer": mixer}]}, "test")


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in_sequence"])
@each_case
def test_import_closes_every_gate(case, wrapped):
    mixer = {"kind": case.kind, **{name: value for name, value in case.options.items() if name != "gate_init"}}
    if wrapped:
        mixer = {"kind": "sequential", "mixers": ["sliding_attention", mixer]}
    stage = meta_stage(with_closed_gates(model_of(case, mixer)))
    gates = [module for module in stage.modules() if isinstance(module, MemoryGate)]
    starts = [info(gate.logit).init((1,), torch.Generator()).item() for gate in gates]
    assert starts == [CLOSED] * len(gates)
    has_gate = case.kind in GATED and case.options.get("gate") != "none"
    if case.kind == "infinity_former":  # without a gate, which import adds none of: its output starts at zero
        has_gate = False
        outputs = [module for name, module in stage.named_modules() if name.endswith("long_output")]
        assert [info(o.weight).init((1,), torch.Generator()).item() for o in outputs] == [0.0] * 2
    if case.kind == "melodi":
        has_gate = "long_memory" in case.options
    assert len(gates) == (2 if has_gate else 0)


def test_a_field_that_starts_a_gate_has_one_name():
    assert {kind for kind, config in MIXERS.kinds().items() if "gate_init" in config.model_fields} == GATED
    assert not [
        (kind, name)
        for kind, config in MIXERS.kinds().items()
        for name in config.model_fields
        if name.endswith("gate_init") and name != "gate_init"
    ]


def test_a_gate_whose_start_was_given_keeps_it():
    given = {"kind": "infini_attention", "gate_init": 0.5}
    shape = {"layers": 2, "hidden_size": 16, "heads": 2, "chunk_size": 8}
    memory = [{"layers": [1], "mixer": {"kind": "sequential", "mixers": [given, "infini_attention"]}}]
    model = with_closed_gates(parse_config(ModelConfig, {**shape, "mixer": given, "memory": memory}, "test"))
    assert model.mixer.gate_init == 0.5
    assert [mixer.gate_init for mixer in model.mixer_at(1).mixers] == [0.5, CLOSED]


@each_case
def test_parameters_belong_to_modules_that_are_called(case):
    """ZeRO 3 gathers a parameter by hooks of its module, and what passes states is called past hooks (`Stage`)."""
    stage = meta_stage(case.model(layers=2))
    for name, module in stage.named_modules():
        if isinstance(module, Mixer | Layer | Stage | nn.ModuleDict | nn.ModuleList):
            assert not module._parameters, f"{name} owns {sorted(module._parameters)}"
