"""The check that no wait for a whole device can stop a pipeline for ever.

On CUDA a posted receive is a kernel that runs until its sender's kernel runs, and a send is one that runs until its
receive does. Much makes a process wait for all kernels of its device at a moment that nobody chose: a kernel that is
loaded at its first use, memory that the allocator gives back, pages that are locked, a communicator that is made.
While a receive is posted, such a *sync* waits for the sender, and if that one needs something that this process has
yet to issue, both wait for ever: a *hazard*.

Which syncs are the worst? What happens on all stages is a graph: an operation (an action, a send, a receive) is issued
after the one before it in its program; it begins after what is issued before it on its stream, and after the results
that it uses have come; a send and its receive end after both have begun. A deadlock is a cycle in this graph. A sync
only adds edges to it: from the ends of all operations that its process has issued to the issue of the next one. So if
any syncs close a cycle, then so does a sync after each operation. That one needs no streams any more: each stage
carries out its program one operation at a time, and a send and its receive are carried out together. `check` plays
exactly this, and is thus exact: programs that pass cannot be stopped by any syncs, with any streams, and programs that
do not pass are stopped by some. They pass if and only if there is one line of all actions and transfers of which each
program is a part, and this is how `megamem.pipeline.program` makes them. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from megamem.pipeline.program import Program, Receive, Send
from megamem.pipeline.schedule import Action
from megamem.pipeline.simulate import DeadlockError


class HazardError(DeadlockError):
    """Stages that wait for their whole device may wait for each other for ever."""


def check(programs: Sequence[Program]) -> None:
    """Play the programs of all stages, every operation being waited for before the next is issued.

    Raises: HazardError naming what each stage waits for, if they cannot all be carried out.
    """
    position = [0] * len(programs)

    def at(stage: int) -> Action | Send | Receive | None:
        program = programs[stage]
        return program[position[stage]] if position[stage] < len(program) else None

    moved = True
    while moved:
        moved = False
        for stage in range(len(programs)):
            while (operation := at(stage)) is not None:
                if isinstance(operation, Send):
                    target = operation.transfer.target
                    if at(target) != Receive(operation.transfer):
                        break
                    position[target] += 1
                elif isinstance(operation, Receive):
                    break  # goes on with its send
                position[stage] += 1
                moved = True
    stuck = [f"stage {stage} at {at(stage)}" for stage in range(len(programs)) if at(stage) is not None]
    if stuck:
        raise HazardError(f"a wait for the whole device can stop the pipeline: {', '.join(stuck)}")
