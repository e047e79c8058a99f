"""What stages really post and send, against their programs, and a rehearsal that leaves no trace."""

import copy

import pytest
import torch
import torch.distributed as dist

from megamem.memory.base import Chunk, state_tensors
from megamem.parallel.topology import Topology
from megamem.pipeline.engine import PipelineEngine, build_engine
from megamem.pipeline.program import Send, reading_programs
from megamem.pipeline.reader import ChunkReader
from megamem.pipeline.schedule import Action
from tests.distributed.harness import run_distributed
from tests.distributed.training_cases import (
    CHUNK,
    COMBINED,
    DROPOUT,
    RECURRENT,
    layers_of,
    local_batches,
    run_config,
)

pytestmark = pytest.mark.distributed

CALLS = 3
"""Chunks that are read."""


def sections(pp=4, tp=1, bptt=2, micro=2, **more):
    parallel = {"pp": pp, "tp": tp, **more.pop("parallel", {})}
    return {
        "training": {"bptt_chunks": bptt, "micro_batch_size": micro, **more.pop("training", {})},
        "parallel": parallel,
        **more,
    }


CASES = {
    "pp4": sections(),
    "pp4-bptt1": sections(bptt=1),
    "pp4-recurrent-memory": sections(model=RECURRENT),
    "pp4-recurrent-memory-streams": sections(
        bptt=4,
        model={**layers_of(["local_attention"] * 4), **RECURRENT},
        data={"feeding": "streams", "documents": "pad"},
    ),
    "pp2-tp2-split-bf16": sections(
        2, 2, training={"precision": "bf16"}, parallel={"zero_stage": 1, "sequence_parallel": True}
    ),
    "pp2-dp2-zero1-combined-dropout": sections(
        2,
        model=DROPOUT,
        data=COMBINED["data"],
        training=COMBINED["training"],
        parallel={"zero_stage": 1},
    ),
    "pp2-dp2-recompute": sections(2, model=RECURRENT, training={"recompute": True}),
}


class Log(list):
    """What a rank issues, in words: actions, posted receives and sends, with their channel and the other stage."""

    def __init__(self, topology, monkeypatch):
        super().__init__()
        last = topology.pp_size - 1
        channels = [
            ("hidden chunk", topology.forward_group, lambda rank: rank),
            ("gradient", topology.backward_group, lambda rank: rank),
            ("memory", topology.memory_group, lambda rank: rank * last),
            ("gradient of the memory", topology.memory_gradient_group, lambda rank: rank * last),
        ]
        send, receive = dist.isend, dist.irecv

        def named(word, group, rank):
            channel, _, stage = next(entry for entry in channels if entry[1] is group)
            self.append((word, channel, stage(rank)))

        def isend(tensor, group, group_dst):
            named("send", group, group_dst)
            return send(tensor, group=group, group_dst=group_dst)

        def irecv(tensor, group, group_src):
            named("receive", group, group_src)
            return receive(tensor, group=group, group_src=group_src)

        monkeypatch.setattr(dist, "isend", isend)
        monkeypatch.setattr(dist, "irecv", irecv)

    def watch(self, words):
        if words.startswith(("forward of", "backward of")) and ":" not in words:
            self.append(words)


def in_words(program, tensors):
    """The log of a program. tensors: of a memory."""
    found = []
    for step in program:
        if isinstance(step, Action):
            found.append(str(step))
        else:
            transfer, word = step.transfer, "send" if isinstance(step, Send) else "receive"
            other = transfer.target if isinstance(step, Send) else transfer.source
            found += [(word, transfer.channel, other)] * (tensors if transfer.channel.endswith("memory") else 1)
    return found


def logged_step(engine, topology):
    """What a step issues, and the words of the engine's program."""
    with pytest.MonkeyPatch.context() as patch:
        log = Log(topology, patch)
        engine.step(local_batches(engine.config, topology, 0), 1e-2, log.watch)
    return list(log), in_words(engine.program, memory_tensors(engine))


def memory_tensors(engine):
    return len(engine.executor.memory_shapes(1, engine.dtype))


def logged_reading(engine, topology):
    """What reading issues, and the words of its program."""
    stage, rows = engine.stage, 2
    reader = ChunkReader(stage, topology)
    place = Chunk((0,) * rows)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        log = Log(topology, patch)
        actions = iter(range(CALLS))
        hook = stage.register_forward_pre_hook(lambda *_: log.append(str(Action("forward", 0, next(actions)))))
        reader.read(torch.zeros(CALLS * CHUNK, rows, dtype=torch.int64), place, reader.begin(place))
        hook.remove()
    spanning = bool(stage.model_memories)
    programs = reading_programs(topology.pp_size, CALLS, (lambda action: True) if spanning else None)
    return list(log), in_words(programs[topology.pp_rank], memory_tensors(engine))


def traces(engine):
    """Everything that a rehearsal might change."""
    tensors = {f"parameter {name}": parameter for name, parameter in engine.stage.named_parameters()}
    tensors |= {f"gradient of {n}": p.grad for n, p in engine.stage.named_parameters() if p.grad is not None}
    tensors |= {f"sum of {n}": p._hp_grad for n, p in engine.stage.named_parameters() if hasattr(p, "_hp_grad")}
    tensors |= {f"buffer {name}": buffer for name, buffer in engine.stage.named_buffers()}
    states = list(state_tensors([state for state in engine.optimizer.state.values() if isinstance(state, dict)]))
    tensors |= {f"optimizer {n}": tensor for n, tensor in enumerate(states)}
    tensors["random numbers"] = torch.get_rng_state()
    counts = engine.engine.micro_steps, engine.engine.global_steps, engine.executor._checked
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, counts


def trained(engine, topology, steps=2):
    """Losses and weights after some steps."""
    losses = [
        engine.step(local_batches(engine.config, topology, step), 1e-2, steps_before=step).losses
        for step in range(steps)
    ]
    return [*losses, *(parameter.detach().clone() for parameter in engine.stage.parameters())]


def rehearsed(engine, topology, config):
    """Names of what a rehearsal changed, and whether steps behind it differ from those without it."""
    before, counts = traces(engine)
    random_state = torch.get_rng_state()
    engine.rehearse()
    after, counts_after = traces(engine)
    changed = [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
    if counts != counts_after or not torch.equal(random_state, torch.get_rng_state()):
        changed.append("counters or random numbers")
    found = trained(engine, topology)
    engine.close()
    expected = trained(build_engine(config, topology), topology)
    return changed, all(map(torch.equal, found, expected))


def same(one, other):
    return one is not None and other is not None and torch.equal(one, other)


def world(payload):
    found = {}
    for name in payload:
        config = run_config(**copy.deepcopy(CASES[name]))
        parallel = config.parallel
        topology = Topology.start(parallel.tp, pp=parallel.pp, device="cpu", timeout_s=240)
        engine = build_engine(config, topology)
        assert isinstance(engine, PipelineEngine)
        changed, as_without = rehearsed(engine, topology, config)
        engine = build_engine(config, topology)
        found[name] = {
            "changed": changed,
            "as_without": as_without,
            "step": logged_step(engine, topology),
            "reading": logged_reading(engine, topology),
        }
        engine.close()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_distributed(4, "tests.distributed.test_hazards:world", list(CASES))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("what", ["step", "reading"])
def test_stages_issue_what_their_programs_say(ranks, name, what):
    for rank in ranks:
        found, expected = rank[name][what]
        assert found == expected
    kinds = {entry[1] for rank in ranks for entry in rank[name][what][0] if isinstance(entry, tuple)}
    spanning = "recurrent" in name or "recompute" in name
    assert kinds == {"hidden chunk"} | ({"gradient"} if what == "step" else set()) | (
        {"memory"} if spanning else set()
    ) | ({"gradient of the memory"} if spanning and what == "step" else set())


@pytest.mark.parametrize("name", CASES)
def test_a_rehearsal_leaves_no_trace(ranks, name):
    for rank in ranks:
        assert rank[name]["changed"] == []
        assert rank[name]["as_without"]
