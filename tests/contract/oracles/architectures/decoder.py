"""A decoder with Melodi's rising summaries, one document, one query at a time. (With LaMemo: see `oracles/lamemo.py`.)

A whole chunk is followed by the learned summary rows; tokens of an open chunk go up alone. Row i of a layer sees the
layer's memory m (not rotated) and rows 0 .. i-1 (rotated to their places), never itself. Scores are cosines times the
head's scale e^c. After attention, MLP and their residuals a finished chunk gives, with x the tokens and u the summaries
that left the layer and n() the layer's norms of both,

    u+_s = u_s + b_s + sum_i M_u[i, s] n([x; u])_i      for the layer above
    m_s  = u_s + b_s + sum_i M_m[i, s] n([x; u])_i      where there are as many as summaries,
    m_s  = b_s + sum_i M_m[i, s] [x; u]_i               else
    e_j  = b_j + sum_i M_e[i, j] [x; u]_i               entries of the long-term memory

m and e are normalized before they are projected to keys and values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.contract.oracles import lamemo
from tests.contract.oracles.common import Answer, attend, columns, heads, rms_norm, rotary, swiglu


def run(settings, model, weights: dict[str, Tensor], ids: Tensor) -> Answer:
    """Hidden states after the last norm [tokens, hidden_size], and every layer's state after the last token."""
    if model.mixer_at(0).kind == "lamemo":
        return lamemo.run(settings, model, weights, ids)
    layers = [Layer(model, weights, layer) for layer in range(model.layers)]
    outputs = []
    for begin in range(0, len(ids), model.chunk_size):
        tokens = [weights["embedding.weight"][i] for i in ids[begin : begin + model.chunk_size].tolist()]
        count = len(tokens)
        whole = count == model.chunk_size
        rows = torch.stack([*tokens, *weights["side_rows.weight"]] if whole else tokens)
        for layer in layers:
            rows = layer.read(rows, whole)
        outputs.append(rms_norm(rows, weights["norm.weight"], model.norm_eps)[:count])
    return Answer(torch.cat(outputs), {f"layers.{layer.number}": layer.state() for layer in layers})


def unit(vector: Tensor) -> Tensor:
    """A vector [width] at length one; zeros stay zeros."""
    length = math.sqrt(sum(float(x) ** 2 for x in vector))
    return vector / length if length else vector


class Layer:
    """One layer and what it remembers of one document."""

    def __init__(self, model, weights: dict[str, Tensor], number: int) -> None:
        self.model, self.weights, self.number = model, weights, number
        self.mixer = model.mixer_at(number)
        self.count = self.mixer.memories or self.mixer.summaries
        self.memory = torch.zeros(self.count, model.hidden_size, dtype=torch.float64)
        self.entries: list[tuple[Tensor, Tensor]] = []
        self.open: tuple[Tensor, ...] | None = None

    def own(self, name: str) -> Tensor:
        """A parameter of the mixer."""
        return self.weights[f"layers.{self.number}.mixer.{name}"]

    def key_value(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys of length one and values [rows, kv_heads, width] of normalized vectors [rows, hidden_size]."""
        width = self.model.resolved_head_dim
        key, value = (heads(vectors, self.own(f"{name}.weight"), width) for name in ("key", "value"))
        return torch.stack([torch.stack([unit(k) for k in row]) for row in key]), value

    def read(self, rows: Tensor, whole: bool) -> Tensor:
        """Take a chunk's rows [rows, hidden_size] through the layer."""
        model, prefix = self.model, f"layers.{self.number}."
        normed = rms_norm(rows, self.weights[f"{prefix}mixer_norm.weight"], model.norm_eps)
        query = heads(normed, self.own("query.weight"), model.resolved_head_dim)
        key, value = self.key_value(normed)
        remembered = self.key_value(rms_norm(self.memory, self.own("memory_norm.weight"), model.norm_eps))
        mixed = torch.stack([self.look(i, query[i], key, value, remembered) for i in range(len(rows))])
        out = rows + mixed @ self.own("output.weight").T
        out = out + swiglu(model, self.weights, prefix, out)
        if not whole:
            self.open = key, value, out
            return out
        self.open = None
        return self.write(out)

    def look(self, place: int, query: Tensor, key: Tensor, value: Tensor, remembered: tuple[Tensor, Tensor]) -> Tensor:
        """What all heads of the row at `place` get, joined; query [heads, width]."""
        model, mixed = self.model, []
        for h in range(model.heads):
            g = h // (model.heads // model.resolved_kv_heads)
            # `attend` divides scores by the root of the width
            scale = math.exp(float(self.own("cosine_scale.log")[h])) * math.sqrt(model.resolved_head_dim)
            asked = unit(query[h]) * scale
            keys = [*remembered[0][:, g], *(rotary(key[j, g], j, model.rope_theta) for j in range(place))]
            values = [*remembered[1][:, g], *value[:place, g]]
            got = attend(rotary(asked, place, model.rope_theta), keys, values)
            if self.entries:
                read = attend(asked, [k[g] for k, _ in self.entries], [v[g] for _, v in self.entries])
                gate = 1 / (1 + torch.exp(-self.own("gate.logit")[h]))
                got = (1 - gate) * got + gate * read
            mixed.append(got)
        return torch.cat(mixed)

    def mix(self, name: str, rows: Tensor) -> Tensor:
        """b_s + sum_i M[i, s] rows_i for every output s of the mixing `name`."""
        weight, bias = self.own(f"{name}.weight"), self.own(f"{name}.bias")
        return torch.stack(
            [bias[s] + sum(weight[i, s] * row for i, row in enumerate(rows)) for s in range(weight.shape[1])]
        )

    def write(self, out: Tensor) -> Tensor:
        """Renew the memory from what left the layer [rows, hidden_size]; the rows as the layer above gets them."""
        model, size = self.model, self.model.chunk_size
        tokens, summaries = out[:size], out[size:]
        last, same = self.number == model.layers - 1, self.count == len(summaries)
        if same or not last:
            both = [
                rms_norm(part, self.own(f"{name}.weight"), model.norm_eps)
                for part, name in ((tokens, "token_norm"), (summaries, "summary_norm"))
            ]
            normed = torch.cat(both)
        self.memory = self.mix("memory_mixing", normed) + summaries if same else self.mix("memory_mixing", out)
        if self.mixer.long_memory is not None:
            new = rms_norm(self.mix("entry_mixing", out), self.own("memory_norm.weight"), model.norm_eps)
            self.entries = [*self.entries, *zip(*self.key_value(new), strict=True)][-self.mixer.long_memory :]
        if last:
            return out
        return torch.cat((tokens, summaries + self.mix("summary_mixing", normed)))

    def state(self) -> dict[str, Tensor]:
        """The declared state, with one batch row."""
        model = self.model
        nothing = torch.zeros(0, model.resolved_kv_heads, model.resolved_head_dim, dtype=torch.float64)
        key, value, out = self.open or (nothing, nothing, torch.zeros(0, model.hidden_size, dtype=torch.float64))
        state = {
            "memory": self.memory[:, None],
            "open_keys": columns(key, 0, len(key)),
            "open_values": columns(value, 0, len(value)),
            "open_outputs": out[:, None],
        }
        if (capacity := self.mixer.long_memory) is not None:
            for side, name in enumerate(("long_keys", "long_values")):
                kept = torch.zeros(capacity, 1, *nothing.shape[1:], dtype=torch.float64)
                for place, entry in enumerate(self.entries):
                    kept[capacity - len(self.entries) + place, 0] = entry[side]
                state[name] = kept
        return state
