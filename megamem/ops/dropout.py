"""Dropout by counters: which values are dropped is a function of their place in the run, and of nothing else.

    r = mix(... mix(mix(key of the row, place in the model) + token) + head) + column)       dropped where r < share

mix is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), a
bijection of 64 bits. No random generator is asked and no mask is kept: the backward pass computes the mask again. So
the mask is the same under every layout, in every micro-batch, after a resumption, when activations are computed again,
and in however many calls a chunk is read (Srivastava et al., "Dropout", 2014, for what it is good for).

One hash serves four neighboring columns, 16 bits each, so a share counts in steps of 1 / 65,536.

Letters of shapes: T tokens or queries, K keys, B batch rows, H heads of this rank, W channels of this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

LEVELS = 2**16
"""Values that the random number of one column can have."""
_BITS = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(number: int) -> int:
    """Return the 64 bits that splitmix64's finalizer makes of the lowest 64 bits of `number`."""
    number &= _BITS
    number = (number ^ (number >> 30)) * _FIRST & _BITS
    number = (number ^ (number >> 27)) * _SECOND & _BITS
    return number ^ (number >> 31)


def levels(share: float) -> int:
    """Return how many of the `LEVELS` values of a random number mean that a column is dropped."""
    return min(round(share * LEVELS), LEVELS - 1)


@dataclass(frozen=True)
class DropoutKeys:
    """What the random numbers of one call begin with: a key for each batch row, and the call's place in its rows."""

    rows: tuple[int, ...]
    """A 64-bit number for each batch row: of the run's seed, the optimizer step and the row of the global batch."""
    step: int
    """A 64-bit number of seed and optimizer step alone, for what all rows share."""
    offset: int = 0
    """Place of the call's first token in the sequence that the step reads, the same in all rows."""

    @classmethod
    def of(cls, seed: int, step: int, rows: Iterable[int]) -> DropoutKeys:
        """Return the keys of rows of the global batch, by their numbers, at the start of their sequences.

        Args:
            seed: of the run.
            step: optimizer steps that the run has made before.
            rows: number of each batch row in the global batch.
        """
        # two hashes apart, so that no step of one seed has the numbers of another seed's
        key = mix(mix(seed + _GOLDEN) + _GOLDEN * (step + 1))
        return cls(tuple(mix(key + _GOLDEN * (row + 1)) for row in rows), key)

    def after(self, tokens: int) -> DropoutKeys:
        """Return the keys `tokens` later."""
        return replace(self, offset=self.offset + tokens)

    def at(self, offset: int) -> DropoutKeys:
        """Return the keys at another place of the sequence."""
        return replace(self, offset=offset)

    def of_rows(self, rows: slice) -> DropoutKeys:
        """Return the keys of some of the batch rows."""
        return replace(self, rows=self.rows[rows])

    def inside(self, place: str) -> DropoutKeys:
        """Return the keys of a part of the model, which is named within the part that these are of."""
        name = _hash_of_name(place)
        return replace(self, rows=tuple(mix(row ^ name) for row in self.rows), step=mix(self.step ^ name))


@dataclass(frozen=True)
class Dropout:
    """Which values are dropped at one place of the model, in one call."""

    share: float
    """Probability with which a value is dropped; the others are divided by one minus it."""
    keys: DropoutKeys
    """What the random numbers of this place of the model begin with."""
    rows_before: int = 0
    """How many of the call's first rows are no tokens but side rows, which count by themselves."""
    rows_behind: int = 0
    """How many of the call's last rows are side rows. A model has no more than one of the two kinds."""
    first: int = 0
    """Number of this rank's first head or channel among those of all tensor-parallel ranks."""

    @property
    def scale(self) -> float:
        """The factor of values that are kept."""
        return LEVELS / (LEVELS - levels(self.share))

    def after(self, tokens: int) -> Dropout:
        """Return the same for what follows `tokens` tokens later."""
        return replace(self, keys=self.keys.after(tokens))

    def values(self, x: Tensor, rank: int = 0, ranks: int = 1) -> Tensor:
        """Drop values of x [T / ranks, B, W], the `rank`-th of `ranks` equal parts of a call's tokens."""
        return _drop(x, partial(self._of_values, x.shape, x.device, rank, ranks), self.scale)

    def _of_values(self, shape: torch.Size, device: torch.device, rank: int, ranks: int) -> Tensor:
        """Return which values of `shape` are dropped, bool; arguments as of `values`."""
        tokens, _, channels = shape
        places = self._places(tokens * ranks, device)[rank * tokens : (rank + 1) * tokens]
        keys = _mixed(_on_device(self.keys.rows, device) + places[:, None] * _signed(_GOLDEN))  # [T, B]
        return _dropped(keys, self.first, channels, self.share)

    def table(self, x: Tensor) -> Tensor:
        """Drop values of a table x [rows, W] that all batch rows share; its last row is number 0, as of distances."""
        return _drop(x, partial(self._of_table, x.shape, x.device), self.scale)

    def _of_table(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Return which values of `shape` are dropped, bool; see `table`."""
        numbers = torch.arange(shape[0] - 1, -1, -1, device=device)
        keys = _mixed(_on_device((self.keys.step,), device) + numbers * _signed(_GOLDEN))
        return _dropped(keys, self.first, shape[1], self.share)

    def shares(self, x: Tensor, causal: bool) -> Tensor:
        """Drop shares of attention.

        Args:
            x: [B, H, T, K], what each query gives to each key.
            causal: whether the last key is the last query's own, as the one before is of the query before: keys count
                by their places in the sequence then. If not, they count from the last one on, alike for all queries.
        """
        first = self.keys.offset + x.shape[2] - x.shape[3] if causal else -x.shape[3]
        return _drop(x, partial(self._of_shares, x.shape, x.device, first), self.scale)

    def _of_shares(self, shape: torch.Size, device: torch.device, first_column: int) -> Tensor:
        """Return which shares of `shape` [B, H, T, K] are dropped, bool. first_column: number of the first key."""
        _, heads, tokens, columns = shape
        numbers = torch.arange(self.first, self.first + heads, device=device)
        of_heads = _mixed(_on_device(self.keys.rows, device)[:, None] + numbers * _signed(_GOLDEN))
        keys = _mixed(of_heads[..., None] + self._places(tokens, device) * _signed(_GOLDEN))  # [B, H, T]
        return _dropped(keys, first_column, columns, self.share)

    def _places(self, rows: int, device: torch.device) -> Tensor:
        """Return the places of `rows` rows of a call, int64: of tokens in the sequence, below zero of side rows."""
        end = self.keys.offset + rows - self.rows_before - self.rows_behind
        tokens = torch.arange(self.keys.offset, end, device=device)
        if self.rows_before:
            first = self.keys.offset * self.rows_before
            return torch.cat((-1 - torch.arange(first, first + self.rows_before, device=device), tokens))
        if not self.rows_behind:
            return tokens
        first = end * self.rows_behind
        return torch.cat((tokens, -1 - torch.arange(first, first + self.rows_behind, device=device)))


def dropped(x: Tensor, dropout: Dropout | None, rank: int = 0, ranks: int = 1) -> Tensor:
    """Return x [T / ranks, B, W] with values dropped, or as it is if `dropout` is None; see `Dropout.values`."""
    return x if dropout is None else dropout.values(x, rank, ranks)


class _Dropped(torch.autograd.Function):
    """The product with a mask that is computed anew in the backward pass, so that nothing is kept of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Callable[[], Tensor], scale: float) -> Tensor:
        """Return x [N, ...] times `scale` where `mask`, bool of the same shape, is false, and zeros elsewhere."""
        ctx.mask, ctx.scale = mask, scale
        return (x * scale).masked_fill_(mask(), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x from that of the result, [N, ...]."""
        return (grad * ctx.scale).masked_fill(ctx.mask(), 0.0), None, None


def _drop(x: Tensor, mask: Callable[[], Tensor], scale: float) -> Tensor:
    """Apply `_Dropped` to x [N, ...]."""
    out: Tensor = _Dropped.apply(x, mask, scale)
    return out


def _dropped(keys: Tensor, first: int, count: int, share: float) -> Tensor:
    """Return which columns from `first` on are dropped, bool [N, ..., count]; keys: [N, ...] int64."""
    begin, end = first // 4, -(-(first + count) // 4)
    groups = torch.arange(begin, end, device=keys.device) * _signed(_GOLDEN)
    # four numbers of 16 bits in each hash
    numbers = _mixed(keys[..., None] + groups).view(torch.int16)
    skipped = first - 4 * begin
    return numbers[..., skipped : skipped + count] < levels(share) - LEVELS // 2


def _mixed(numbers: Tensor) -> Tensor:
    """Return `mix` of int64 numbers [N, ...], written over them."""
    # torch shifts the sign in from the left: it is masked out
    numbers ^= (numbers >> 30).bitwise_and_(_BITS >> 30)
    numbers *= _signed(_FIRST)
    numbers ^= (numbers >> 27).bitwise_and_(_BITS >> 27)
    numbers *= _signed(_SECOND)
    numbers ^= (numbers >> 31).bitwise_and_(_BITS >> 31)
    return numbers


def _signed(number: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit number."""
    return number - 2**64 if number >= 2**63 else number


@lru_cache(maxsize=256)
def _hash_of_name(name: str) -> int:
    """Return 64 bits of the hash of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


@lru_cache(maxsize=256)
def _on_device(keys: tuple[int, ...], device: torch.device) -> Tensor:
    """Return keys as int64 [keys] on a device, without making the host wait; cached for the backward pass."""
    with torch.inference_mode(False):
        tensor = torch.tensor([_signed(key) for key in keys], device="cpu")
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
