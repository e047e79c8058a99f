"""Memory Caching, one token and one head at a time, over the oracle of the memory it keeps."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from tests.contract.oracles import recurrence
from tests.contract.oracles.common import Answer, heads


def shares_of(mixer, router_query: Tensor, pools: list[Tensor]) -> list[float]:
    """Return the shares of the kept segments that may be read, the oldest first, and of the open one.

    router_query: u [width], or a score for each age; pools: of the same segments, like u.
    """
    if mixer.combine == "residual":
        return [1.0] * len(pools)
    if mixer.scores == "token":
        ages = [min(len(pools) - 1 - i, mixer.ages - 1) for i in range(len(pools))]
        scores = [float(router_query[age]) / mixer.temperature for age in ages]
    else:
        scores = [float(router_query @ pool) / mixer.temperature for pool in pools]
    chosen = set(range(len(pools)))
    if mixer.combine == "ssc":
        best = sorted(range(len(pools) - 1), key=lambda i: -scores[i])[: mixer.top_k]
        chosen = {*best, len(pools) - 1}
    if mixer.gate == "softmax":
        total = sum(math.exp(scores[i]) for i in chosen)
        return [math.exp(score) / total if i in chosen else 0.0 for i, score in enumerate(scores)]
    gate = {"sigmoid": recurrence.sigmoid, "raw": float, "none": lambda score: 1.0}[mixer.gate]
    return [gate(score) if i in chosen else 0.0 for i, score in enumerate(scores)]


def run(mixer, model, weights: dict[str, Tensor], hidden: Tensor) -> Answer:
    """See the package's docstring; hidden [tokens, hidden_size]."""
    inner, own = mixer.memory, {name.removeprefix("memory."): w for name, w in weights.items()}
    memory = importlib.import_module(f"tests.contract.oracles.{inner.kind}").Memory(inner, model, own, hidden)
    made, state = recurrence.projections(inner, model, own, hidden)
    width = mixer.ages if mixer.scores == "token" else model.resolved_head_dim
    routed = heads(hidden, weights["router.weight"], width) if "router.weight" in weights else None
    groups, tokens, segment = model.heads // model.resolved_kv_heads, len(hidden), mixer.segment
    now = [memory.begin(h) for h in range(model.resolved_kv_heads)]
    total = torch.zeros(model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
    closed: list[list[tuple]] = [[] for _ in range(model.resolved_kv_heads)]  # (memory, pool) of each head's segments
    keys, output = torch.zeros_like(made["key"]), []
    for t in range(tokens):
        count = t % segment + 1
        within = t // segment * segment
        if mixer.max_chunks is not None:
            reach = min(within, t % model.chunk_size // segment * segment + mixer.max_chunks * model.chunk_size)
        else:
            reach = within
        first = (within - reach) // segment
        for h in range(model.resolved_kv_heads):
            keys[t, h] = memory.prepare(made["key"][t, h], t)
            now[h] = memory.write(now[h], t, h, keys[t, h], made["value"][t, h])
            total[h] += keys[t, h]
        reads = []
        for h in range(model.heads):
            g, query = h // groups, memory.ask(made["query"][t, h], t)
            router_query = query if routed is None else routed[t, h]
            readable = closed[g][first:]
            pool = total[g] / count if mixer.pooling == "mean" else total[g]
            shares = shares_of(mixer, router_query, [*(p for _, p in readable), pool])
            memories = [*(m for m, _ in readable), now[g]]
            if mixer.combine == "soup":
                reads.append(memory.read(memory.mixture(list(zip(shares, memories, strict=True))), query))
            else:
                answers = (share * memory.read(m, query) for share, m in zip(shares, memories, strict=True))
                reads.append(sum(answers))
        reads = [read + memory.beside(made["value"][t, h // groups], h // groups) for h, read in enumerate(reads)]
        output.append(recurrence.finished(inner, model, own, hidden[t], reads))
        if count == segment:
            for h in range(model.resolved_kv_heads):
                pool = total[h] / segment if mixer.pooling == "mean" else total[h].clone()
                closed[h].append((memory.closed(now[h]), pool))
                total[h] = 0
                if mixer.write == "independent":
                    now[h] = memory.begin(h)
    return Answer(
        torch.stack(output),
        {
            **memory.state(now, keys, made["value"]),
            **state,
            "key_sum": total[None].clone(),
            **kept_state(mixer, model, memory, closed),
        },
    )


def kept_state(mixer, model, memory, closed) -> dict:
    """Return the list of whole chunks within reach, and the segments of the open one."""

    def columns(part: slice) -> dict[str, Tensor]:
        """Return some segments of all heads as one entry."""
        heads = [[{**memory.kept(m), "pool": pool} for m, pool in head[part]] for head in closed]
        names = [*memory.kept(memory.begin(0)), "pool"]
        count = len(heads[0])
        found = {}
        for name in names:
            like = {**memory.kept(memory.begin(0)), "pool": torch.zeros(model.resolved_head_dim)}[name]
            each = [column[name] for head in heads for column in head]
            stacked = torch.stack(each) if each else torch.zeros(0, *like.shape, dtype=torch.float64)
            found[name] = stacked.reshape(1, model.resolved_kv_heads, count, *like.shape)
        return {**found, "filled": torch.ones(1, count, dtype=torch.float64)}

    per = model.chunk_size // mixer.segment
    whole = len(closed[0]) // per
    first = 0 if mixer.max_chunks is None else max(0, whole - mixer.max_chunks)
    entries = [columns(slice(i * per, (i + 1) * per)) for i in range(first, whole)]
    open_ones = columns(slice(whole * per, None))
    return {"kept": entries, **{f"closed_{name}": tensor for name, tensor in open_ones.items()}}
