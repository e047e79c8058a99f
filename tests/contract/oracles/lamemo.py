"""A decoder whose layers are LaMemo's, one document, one place at a time.

A chunk begins at token b. Its rows stand for tokens max(0, b - M) .. b-1 and enter the bottom layer as these tokens'
embeddings. In each layer, with places counted from the oldest row on, c rows and then the chunk's tokens,

    score(i, j) = ((q_i + u) . k_j + (q_i + v) . W_r w_d) / sqrt(width)

    a token i reads j <= i           v = v+, d = i - j
    a row i reads i < j <= c         v = v-, d = j - i; of these places the newest min(N, M). Place c is the first token
                                     (`positions: transformer_xl`: v+ and d = i - j below 0; without `order_mask` all
                                     of the newest places, d = |i - j| or i - j)

w_d holds the sines of d / 10000^(2i / hidden_size) and then their cosines. With s the sum of exponentials of scores, a
row puts out a c_old + (1 - a) c_new, a = s_old / (s_old + s_new + 1e-6 max(s_old, s_new)), and its recorded sum becomes
s_old + s_new; what a token reads is recorded for when it is a row. The topmost layer's rows put out nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles.common import Answer, columns, projected, rms_norm, swiglu
from tests.contract.oracles.transformer_xl import wave

Record = tuple[list[Tensor], list[float]]
"""What a place read: per head a vector [width], and the logarithm of the sum of exponentials."""


def run(settings, model, weights: dict[str, Tensor], ids: Tensor) -> Answer:
    """Hidden states after the last norm [tokens, hidden_size], and every component's state after the last token."""
    layers = [Layer(model, weights, layer) for layer in range(model.layers)]
    length, chunk = layers[0].length, model.chunk_size
    embedded = torch.stack([weights["embedding.weight"][i] for i in ids.tolist()])
    if model.scale_embedding:
        embedded = embedded * math.sqrt(model.hidden_size)
    outputs = []
    for begin in range(0, len(ids), chunk):
        rows, tokens = embedded[max(0, begin - length) : begin], embedded[begin : begin + chunk]
        for layer in layers:
            rows, tokens = layer.read(rows, tokens)
        outputs.append(rms_norm(tokens, weights["norm.weight"], model.norm_eps))
    recent = torch.cat((torch.zeros(length, model.hidden_size, dtype=torch.float64), embedded))[-length:]
    states = {f"layers.{layer.number}": layer.state() for layer in layers}
    return Answer(torch.cat(outputs), {**states, "recent_tokens": {"embeddings": recent[:, None]}})


class Layer:
    """One layer and what it has recorded of one document."""

    def __init__(self, model, weights: dict[str, Tensor], number: int) -> None:
        self.model, self.weights, self.number = model, weights, number
        self.mixer = model.mixer_at(number)
        self.length = self.mixer.memory_length or model.chunk_size
        self.top = number == model.layers - 1
        self.records: list[Record] = []
        self.open: tuple[Tensor, Tensor] | None = None

    def own(self, name: str) -> Tensor:
        """A parameter of the mixer, or one that all layers share."""
        if name.startswith("biases.") and self.mixer.shared_biases:
            return self.weights[f"score_{name}"]
        return self.weights[f"layers.{self.number}.mixer.{name}"]

    def read(self, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Take rows [c, hidden_size] and a chunk's tokens [tokens, hidden_size] through the layer."""
        model, prefix, count = self.model, f"layers.{self.number}.", len(rows)
        both = torch.cat((rows, tokens))
        normed = rms_norm(both, self.weights[f"{prefix}mixer_norm.weight"], model.norm_eps)
        mixer = {name.removeprefix(f"{prefix}mixer."): w for name, w in self.weights.items() if name.startswith(prefix)}
        query, key, value = (projected(model, mixer, normed, name) for name in ("query", "key", "value"))
        found: list[Record] = []
        for i in range(0 if not self.top else count, len(both)):
            found.append(self.row(i, count, query, key, value) if i < count else self.token(i, query, key, value))
        known = [] if self.top else found[:count]
        self.records = [*known, *found[len(known) :]][-self.length :]
        self.open = (key, value) if len(tokens) < model.chunk_size else None
        mixed = torch.stack([torch.cat(vectors) for vectors, _ in found])
        out = both[len(both) - len(found) :] + mixed @ self.own("output.weight").T
        out = out + swiglu(model, self.weights, prefix, out)
        return (rows, out) if self.top else (out[:count], out[count:])

    def token(self, i: int, query: Tensor, key: Tensor, value: Tensor) -> Record:
        """What a token reads of all places up to its own; query, key, value: [places, heads, width] each."""
        return self.look(query[i], key, value, [(j, i - j) for j in range(i + 1)], "distance")

    def row(self, i: int, count: int, query: Tensor, key: Tensor, value: Tensor) -> Record:
        """What a row of `count` puts out, with the sum over all it has ever read; [places, heads, width] each."""
        signed = self.mixer.positions == "transformer_xl"
        old = self.records[i] if self.records else None
        if not self.mixer.look_ahead:
            return old
        newest = range(max(0, count + 1 - min(self.model.chunk_size, self.length)), count + 1)
        seen = [(j, i - j if signed else abs(i - j)) for j in newest if j > i or not self.mixer.order_mask]
        vectors, sums = self.look(query[i], key, value, seen, "distance" if signed else "ahead")
        if not self.mixer.interpolate:
            return vectors, sums
        mixed, total = [], []
        for c_old, s_old, c_new, s_new in zip(*old, vectors, sums, strict=True):
            largest = max(s_old, s_new)
            before, now = math.exp(s_old - largest), math.exp(s_new - largest)
            share = before / (before + now + 1e-6)
            mixed.append(share * c_old + (1 - share) * c_new)
            total.append(largest + math.log(before + now))
        return mixed, total

    def look(self, query: Tensor, key: Tensor, value: Tensor, seen: list[tuple[int, int]], bias: str) -> Record:
        """What a place with query [heads, width] reads of places at distances; bias: the name of its v."""
        model = self.model
        width = model.resolved_head_dim
        of_distances = self.own("distance_key.weight").view(model.heads, width, -1)
        vectors, sums = [], []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            content, distance = query[h] + self.own("biases.content")[h], query[h] + self.own(f"biases.{bias}")[h]
            scores = [
                float(content @ key[j, g] + distance @ (of_distances[h] @ wave(d, model.hidden_size)))
                / math.sqrt(width)
                for j, d in seen
            ]
            largest = max(scores)
            total = sum(math.exp(score - largest) for score in scores)
            vectors.append(
                sum(math.exp(s - largest) / total * value[j, g] for s, (j, _) in zip(scores, seen, strict=True))
            )
            sums.append(largest + math.log(total))
        return vectors, sums

    def state(self) -> dict[str, Tensor]:
        """The declared state, with one batch row; nothing is recorded of what nobody will read."""
        model, width = self.model, self.model.resolved_head_dim
        nothing = torch.zeros(0, model.resolved_kv_heads, width, dtype=torch.float64)
        key, value = self.open or (nothing, nothing)
        state = {"open_keys": columns(key, 0, len(key)), "open_values": columns(value, 0, len(value))}
        if self.top or (self.mixer.look_ahead and not self.mixer.interpolate):
            return state
        records = torch.zeros(self.length, 1, model.heads, width, dtype=torch.float64)
        log_sums = torch.zeros(self.length, 1, model.heads, dtype=torch.float64)
        for place, (vectors, sums) in enumerate(self.records, self.length - len(self.records)):
            records[place, 0], log_sums[place, 0] = torch.stack(vectors), torch.tensor(sums, dtype=torch.float64)
        state["records"] = records
        return {**state, "log_sums": log_sums} if self.mixer.look_ahead else state
