"""The state of torchrun's rendezvous in a store, signed: torchrun unpickles it, so it must be no stranger's."""

from __future__ import annotations

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from megamem.parallel.control import Signer

State = tuple[bytes, bytes]
"""The state, and the token by which the store knows it: all that stands there."""


class SignedBackend(C10dRendezvousBackend):
    """torchrun's backend, which takes for the state only what a node of the job has written, and puts that back."""

    def __init__(self, store: Store, run_id: str, signer: Signer) -> None:
        """Keep the state of the rendezvous `run_id` in `store`."""
        self._signer = signer
        self._last: State | None = None
        super().__init__(store, run_id)

    def get_state(self) -> State | None:
        """Return the state; None if there is none yet. Raises RendezvousConnectionError where the store is gone."""
        return self._believed(self._call_store("get", self._key))

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        """Write the state where the one that `token` is of still stands. Return what stands then, and whether so.

        Raises: RendezvousConnectionError where the store is gone.
        """
        if token and not isinstance(token, bytes):
            found = self.get_state()
        else:
            expected = token.decode() if isinstance(token, bytes) else self._NULL_SENTINEL
            ours = self._signer.signed(self._key, state.hex())
            found = self._believed(self._call_store("compare_set", self._key, expected, ours))
        return None if found is None else (*found, found[0] == state)

    def _believed(self, raw: bytes) -> State | None:
        """Return the state that stands in the store, or, where a stranger has written there, the one before."""
        if raw == self._NULL_SENTINEL.encode() and self._last is None:
            return None
        if (text := self._signer.verified(self._key, raw)) is not None:
            self._last = bytes.fromhex(text), raw
        else:
            self._call_store("set", self._key, self._last[1].decode() if self._last else self._NULL_SENTINEL)
        return self._last
