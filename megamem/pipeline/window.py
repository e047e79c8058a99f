"""Without a pipeline: whole windows forward, then backward as one, through DeepSpeed's engine under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megamem.memory.base import Chunk, State, detach, state_tensors
from megamem.model.stage import Stage


class Window(nn.Module):
    """The module DeepSpeed drives. Its forward is a window; the states it returns are cut from the graph."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self._checked = False

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        starts: npt.NDArray[np.int64],
        states: Sequence[State],
        scale: Tensor,
    ) -> tuple[Tensor, Tensor, list[State]]:
        """Run the chunks of a window.

        Args:
            tokens, labels: [chunks * chunk_size, batch] int64.
            starts: [chunks, batch] host integers, position of each chunk's first token in its document.
            states: one per layer.
            scale: factor of the summed loss (scalar).
        Raises: ContractError, in the first window, where a layer's state is not as it declares.
        Returns: the scaled loss to run backward, auxiliary losses included; the summed cross-entropy in nats, off the
            graph; the new states, off the graph.
        """
        size = tokens.shape[0] // len(starts)
        current = list(states)
        total = scale.new_zeros(())
        extra = scale.new_zeros(())
        for c, row in enumerate(starts):
            part = slice(c * size, (c + 1) * size)
            # past module hooks, as everything that passes states (`Stage`)
            hidden, current, auxiliary = self.stage.forward(tokens[part], current, Chunk(tuple(row.tolist())))
            if not self._checked:
                self.stage.check_states(current, len(row))
            total = total + self.stage.token_losses(hidden, labels[part]).sum()
            for value in auxiliary.values():
                # a mean over this chunk's tokens and rows, weighted as many predicted tokens
                extra = extra + value * tokens[part].numel()
        self._checked = True
        loss = (total + extra) * scale
        return loss, total.detach(), [detach(state) for state in current]


def select_states(finite: Tensor, new: Sequence[State], old: Sequence[State]) -> list[State]:
    """`new` where `finite` (a bool scalar on the device) holds, else `old`; where shapes differ, `new` or zeros.

    Of growing lists, which are passed on by reference, what `old` has too stays as it is; the rest is `new` or zeros.
    Integers stay those of `new`: they count places, which are known whatever the step was worth.
    """

    def pick(a: object, b: object) -> object:
        if isinstance(a, Tensor):
            if not a.is_floating_point():
                return a
            old_value = b if isinstance(b, Tensor) and a.shape == b.shape else torch.zeros_like(a)
            return torch.where(finite, a, old_value)
        if isinstance(a, dict):
            return {key: pick(value, b.get(key) if isinstance(b, dict) else None) for key, value in a.items()}
        assert isinstance(a, list)
        before = {tensor.data_ptr() for tensor in state_tensors(b)}
        return [e if all(t.data_ptr() in before for t in state_tensors(e)) else pick(e, None) for e in a]

    return [pick(a, b) for a, b in zip(new, old, strict=True)]  # type: ignore[misc]
