"""The oracle of hazards: hosts, CUDA streams and NCCL's kernels as a graph of what waits for what, with times.

Written apart from `megamem.pipeline.hazards`: every wait is an edge, streams and syncs among them; a deadlock is a
cycle, and times are the longest paths.
"""

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from megamem.pipeline.program import Receive, Send, Transfer
from megamem.pipeline.schedule import Action


def used(stage, stages, action, bptt, spanning):
    """The transfers whose results an action uses on its stage."""
    m, c, last = action.micro_batch, action.chunk, stages - 1
    if action.kind == "forward":
        if stage > 0:
            return [Transfer("hidden chunk", action, stage - 1, stage)]
        return [Transfer("memory", Action("forward", m, c - 1), last, 0)] if spanning and last and c else []
    found = [Transfer("gradient", action, stage + 1, stage)] if stage < last else []
    if spanning and last and stage == last and (c + 1) % bptt:
        found.append(Transfer("gradient of the memory", Action("backward", m, c + 1), 0, last))
    return found


def sends(orders, bptt, spanning):
    """The sends behind each (stage, action): whatever an action of another stage uses of it."""
    found = defaultdict(list)
    for target, order in enumerate(orders):
        for action in order:
            for transfer in used(target, len(orders), action, bptt, spanning):
                found[transfer.source, transfer.action].append(Send(transfer))
    return found


def waits(programs, bptt, spanning, syncs=(), pairs=True, pending=None):
    """What waits for what: {node: the nodes it waits for}.

    Nodes: ("issue", stage, n) and ("begin", stage, n) of the n-th operation of a stage; (stage, action), an action's
    end; a transfer, the end of both its kernels.

    syncs: (stage, n): the host waits for its whole device behind its n-th operation.
    pairs: whether each pair of ranks has a stream of its own on a channel; if not, a channel has one on each rank.
    pending: sends of a channel that may be under way before the stream of actions waits for the oldest.
    """
    found = defaultdict(set)
    for stage, program in enumerate(programs):
        issued, streams, sent = [], {}, defaultdict(list)
        for n, operation in enumerate(program):
            issue, begin = ("issue", stage, n), ("begin", stage, n)
            end = (stage, operation) if isinstance(operation, Action) else operation.transfer
            found[issue] |= {("issue", stage, n - 1)} if n else set()
            found[issue] |= set(issued) if (stage, n - 1) in syncs else set()
            # torch lets the streams of NCCL, too, wait for the actions that were issued before
            found[begin] |= {issue} | streams.get("actions", set())
            found[end].add(begin)
            if isinstance(operation, Action):
                stream = "actions"
                found[begin] |= set(used(stage, len(programs), operation, bptt, spanning))
            else:
                stream = end.channel, (end.source, end.target) if pairs else None
                found[begin] |= streams.get(stream, set())
            streams[stream] = {end}
            if isinstance(operation, Send) and pending is not None:
                sent[end.channel].append(end)
                streams["actions"] = streams["actions"] | set(sent[end.channel][: -pending or None])
            issued.append(end)
    return found


def deadlocks(graph):
    """Whether something waits for itself."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def makespan(graph, cost, transfer):
    """When the last action ends. cost(stage, action): its time; transfer: the time of every transfer."""
    ends = {}
    for node in TopologicalSorter(graph).static_order():
        own = transfer if isinstance(node, Transfer) else 0 if node[0] in ("issue", "begin") else cost(*node)
        ends[node] = own + max((ends[before] for before in graph.get(node, ())), default=0)
    return max(end for node, end in ends.items() if isinstance(node, tuple) and node[0] not in ("issue", "begin"))


def posted_two_ahead(orders, bptt, spanning=False):
    """Programs that post two receives of chunks and of gradients at the start, and one more at each use.

    So megamem once did. Memories that span the model were received at their use.
    """
    stages, sent = len(orders), sends(orders, bptt, spanning)
    found = []
    for stage, order in enumerate(orders):

        def receives(actions, memories, stage=stage):
            transfers = [t for action in actions for t in used(stage, stages, action, bptt, spanning)]
            return [Receive(t) for t in transfers if t.channel.endswith("memory") == memories]

        kinds = ("forward", "backward")
        ahead = {kind: receives([action for action in order if action.kind == kind], False) for kind in kinds}
        program = [receive for kind in kinds for receive in ahead[kind][:2]]
        left = {kind: iter(ahead[kind][2:]) for kind in kinds}
        for action in order:
            more = next(left[action.kind], None)
            program += [more] if more is not None else []
            program += [*receives([action], True), action, *sent[stage, action]]
        found.append(program)
    return found
