"""Windows as DeepSpeed drives them without a pipeline: all chunks forward, then one backward, under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megamem.config.training import WindowOrder
from megamem.memory.base import Chunk, States, detach, state_tensors
from megamem.model.objective import Objective
from megamem.model.stage import Stage
from megamem.pipeline.distillation import DISTILLATION, Teacher
from megamem.pipeline.train_chunk import loss_names, train_chunk


class Window(nn.Module):
    """The module that DeepSpeed drives. Its forward is a window; the states it returns are cut from the graph."""

    def __init__(
        self, stage: Stage, objective: Objective, teacher: Teacher | None = None, order: WindowOrder = "chunks"
    ) -> None:
        """Drive a stage that holds the whole model.

        teacher: whose predictions it learns too, if it has one; order: `training.window_order`.
        """
        super().__init__()
        self.order = order
        self.teacher = teacher
        self.stage = stage
        self.objective = objective
        self._checked = False

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        places: Sequence[Chunk],
        states: States,
        scale: Tensor,
        reading: int = 0,
        taught: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, States]:
        """Run the chunks of a window.

        Args:
            tokens, labels: [chunks * chunk_size, batch] int64.
            places: where each chunk's tokens lie in their documents.
            states: by component.
            scale: factor of the summed loss (scalar).
            reading: number of the objective's reading whose losses these are.
            taught: the teacher's last hidden states [chunks * chunk_size, batch, hidden_size].
        Raises: ContractError, in the first window, where a component's state is not as it declares.
        Returns: the scaled loss to run backward, auxiliary losses included; `loss_names`, [names] summed over tokens,
            off the graph, zero for other readings; the new states, off the graph.
        """
        objective = self.objective.readings[reading].objective
        calls: Sequence[Chunk | Sequence[Chunk]] = [places]
        if self.order == "chunks":
            calls = self.stage.prepare(tokens, places)
        else:
            tokens, labels = (self.stage.in_window_order(each, len(places)) for each in (tokens, labels))
        size = tokens.shape[0] // len(calls)
        names = loss_names(self.stage, self.objective, self.teacher is not None)
        sums = {name: scale.new_zeros(()) for name in names}
        for c, place in enumerate(calls):
            part = slice(c * size, (c + 1) * size)
            result = train_chunk(self.stage, objective, tokens[part], labels[part], states, place, not self._checked)
            states = result.states
            for name, value in result.losses.items():
                sums[name] = sums[name] + value
            if self.teacher is not None and taught is not None:
                learned = self.teacher.divergence(self.stage, result.hidden, taught[part], labels[part])
                sums[DISTILLATION] = sums[DISTILLATION] + learned
            for name, value in result.auxiliary.items():
                # a mean over the tokens and rows that were read, weighted as many predicted tokens
                sums[name] = sums[name] + value * tokens[part].numel()
        self._checked = True
        terms = list(sums.values())
        total = terms[0]
        for more in terms[1:]:
            total = total + more
        return total * scale, torch.stack([value.detach() for value in terms]), detach(states)


def select_states(finite: Tensor, new: States, old: States) -> States:
    """Return `new` where `finite` (a bool scalar on the device) holds, else `old`; where shapes differ, `new` or zeros.

    What `old` has too of growing lists, which are passed on by reference, stays as it is; the rest is `new` or zeros.
    Integers stay those of `new`: they count places, which are known whatever the step was worth.
    """

    def pick(a: object, b: object) -> object:
        if isinstance(a, Tensor):
            if not a.is_floating_point():
                return a
            old_value = b if isinstance(b, Tensor) and a.shape == b.shape else torch.zeros_like(a)
            return torch.where(finite, a, old_value)
        if isinstance(a, Mapping):
            return {key: pick(value, b.get(key) if isinstance(b, Mapping) else None) for key, value in a.items()}
        assert isinstance(a, list)
        before = {tensor.data_ptr() for tensor in state_tensors(b)}
        return [e if all(t.data_ptr() in before for t in state_tensors(e)) else pick(e, None) for e in a]

    return {name: pick(new[name], old[name]) for name in new}  # type: ignore[misc]
