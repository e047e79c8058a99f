"""Table 13 of "Elastic Memory": how well a HiPPO-LegS state reproduces the keys and values of a trained model.

    python -m benchmarks.kv_reconstruction RUN [--tokens 4096] [--documents 8]

RUN: folder of a finished run with an Elastic Memory layer. Keys (before rotation) and values of that layer are taken
from held-out documents, compressed into states of order N, and read back at every token. N has the paper's shares of
the context: 540 to 8,640 coefficients for 32,768 tokens are 1.6 % to 26 %. The error is given as it is and over the
variance of the channels (1: nothing is reproduced), read at the left edge of tokens as in the paper, and at their
middle.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.charts import beside
from benchmarks.common import OUTPUT, fix_threads, publish, table
from checkpoints.trained import open_run
from megamem.errors import ConfigError
from megamem.memory.base import Chunk
from megamem.memory.continuous.elastic_memory import ElasticMemory
from megamem.memory.continuous.hippo import kernel, reconstruction
from megamem.model.stage import Stage
from megamem.training.build import held_out_documents

PAPER = {540: 0.45, 1080: 0.41, 2160: 0.35, 4320: 0.31, 8640: 0.27}
"""Order for 32,768 tokens -> error."""
CONTEXT = 32_768


@contextmanager
def collected(mixer: ElasticMemory) -> Iterator[list[Tensor]]:
    """Keys and values [tokens, rows, 2, kv_heads, width] of every block that `mixer` stores meanwhile."""
    blocks: list[Tensor] = []
    remember = mixer.remember

    def watched(state: Any, span: Any, keys: Tensor, values: Tensor) -> Any:
        blocks.append(torch.stack((keys, values), dim=2))
        return remember(state, span, keys, values)

    with mock.patch.object(mixer, "remember", watched):
        yield blocks


def keys_and_values(stage: Stage, documents: list[Tensor]) -> Tensor:
    """Return keys and values of the first Elastic Memory layer: [tokens, documents, 2, kv_heads, width], float64."""
    layers = [block.mixer for block in stage.own_layers if isinstance(block.mixer, ElasticMemory)]
    if not layers:
        raise ConfigError("the run has no layer with elastic_memory")
    tokens = torch.stack(documents, dim=1)
    states = stage.initial_states(len(documents), torch.device("cpu"), torch.float32)
    with torch.no_grad(), collected(layers[0]) as blocks:
        for begin in range(0, len(tokens), stage.config.chunk_size):
            part = tokens[begin : begin + stage.config.chunk_size]
            _, states, _ = stage(part, states, Chunk((begin,) * len(documents)))
    return torch.cat(blocks).double()


def errors(signal: Tensor, order: int, offset: float) -> dict[str, float]:
    """Mean squared errors of keys and values [T, ...], as they are and over their channels' variance."""
    total = len(signal)
    state = kernel(order, 0, total) @ signal.flatten(1)
    points = torch.arange(total, dtype=torch.float64) + offset
    error = (reconstruction(order, total, points) @ state - signal.flatten(1)).square().view_as(signal)
    variance = signal.var(0, unbiased=False)
    found = {}
    for index, name in enumerate(("keys", "values")):
        found[name] = error[:, :, index].mean().item()
        found[f"{name}_over_variance"] = (error[:, :, index].mean() / variance[:, index].mean()).item()
    return found


def main() -> None:
    """Parse, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--output", type=Path, default=OUTPUT / "kv_reconstruction.json")
    arguments = parser.parse_args()
    fix_threads()
    trained = open_run(arguments.run)
    config = trained.config
    texts = [d.tokens[: arguments.tokens] for d in held_out_documents(config) if d.predicted_tokens >= arguments.tokens]
    if not texts:
        raise ConfigError(f"no held-out document has {arguments.tokens:,} tokens; give fewer")
    signal = keys_and_values(trained.load(), texts[: arguments.documents])
    rows, records = [], []
    for paper_order, published in PAPER.items():
        order = round(paper_order * arguments.tokens / CONTEXT)
        edge, middle = errors(signal, order, 0.0), errors(signal, order, 0.5)
        records.append({"order": order, "paper_order": paper_order, "paper": published, "edge": edge, "middle": middle})
        shown = [edge["keys"], edge["values"], edge["keys_over_variance"], edge["values_over_variance"]]
        shown += [middle["keys_over_variance"], middle["values_over_variance"]]
        rows.append([str(order), f"{order / arguments.tokens:.1%}", f"{published:.2f}", *(f"{x:.3g}" for x in shown)])
    heads = ["N", "of tokens", "paper", "keys", "values", "keys / variance", "values / variance"]
    print(table([*heads, "keys, middle", "values, middle"], rows))
    picture = arguments.output.with_suffix(".png")
    edges = {f"{r['order'] / arguments.tokens:.1%}": r for r in records}
    series = {name: {share: r["edge"][name] for share, r in edges.items()} for name in ("keys", "values")}
    series |= {f"{n} over variance": {s: r["edge"][f"{n}_over_variance"] for s, r in edges.items()} for n in series}
    series["paper"] = {share: r["paper"] for share, r in edges.items()}
    beside(picture, "Keys and values read back from a state", "mean squared error", series)
    publish(
        {
            "run": str(arguments.run),
            "documents": signal.shape[1],
            "tokens": len(signal),
            "orders": records,
            "picture": str(picture),
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
