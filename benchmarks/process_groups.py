"""How many process groups a rank of a job of 64 is a member of: Megatron-Core's own initialization beside ours.

    python -m benchmarks.process_groups [--json]

No other process is started: torch's fake backend makes groups of ranks that do not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 64
LAYOUTS = {
    "DP 64": (1, 1), "TP 8 x DP 8": (8, 1), "TP 4 x PP 4 x DP 4": (4, 4), "PP 8 x DP 8": (1, 8),
}  # fmt: skip
"""(tensor-parallel size, stages) by name."""


def megatron(tp: int, pp: int) -> None:
    """Make the groups that Megatron-Core makes by itself, without those of gloo."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, create_gloo_process_groups=False
    )


def ours(tp: int, pp: int) -> None:
    """Make the groups of a run whose model neither ties embeddings nor has memories that span it."""
    from megamem.parallel.topology import Topology

    Topology.start(tp, pp=pp, device="cpu", tied=False, memories=False)


def count(make: Callable[[int, int], None], tp: int, pp: int, rank: int) -> dict[str, int]:
    """Return the number of groups that `rank` asks for, and of those among them that it is a member of."""
    from megamem.parallel.libraries import prepare_libraries

    prepare_libraries()
    os.environ.update(WORLD_SIZE=str(WORLD), RANK=str(rank))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    made: list[object] = []
    new_group = c10d._new_group_with_tag

    def counted(*args: object, **options: object) -> object:
        made.append(new_group(*args, **options))
        return made[-1]

    c10d._new_group_with_tag = counted
    make(tp, pp)
    return {"calls": len(made), "member": sum(isinstance(group, ProcessGroup) for group in made)}


def measured(kind: str, layout: str, rank: int = 5) -> dict[str, int]:
    """Return `count` in a process of its own. kind: the name of a function of this file."""
    command = [sys.executable, "-m", "benchmarks.process_groups", "--one", kind, layout, str(rank)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, layout, rank = arguments.one
        sys.stdout.write(json.dumps(count(globals()[kind], *LAYOUTS[layout], int(rank))) + "\n")
        return
    found = {layout: {kind: measured(kind, layout) for kind in ("megatron", "ours")} for layout in LAYOUTS}
    for layout, kinds in found.items():
        words = [f"{kind} {counts['calls']} asked for, member of {counts['member']}" for kind, counts in kinds.items()]
        sys.stdout.write(f"{layout}: {'; '.join(words)}\n")
    if arguments.json:
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
