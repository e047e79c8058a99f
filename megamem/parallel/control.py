"""The stores through which the processes of a job tell one another how it goes: where they listen, whom they believe.

torch's TCPStore listens on all networks and takes whatever reaches its port. The stores of a job on one machine listen
on the machine's own interface alone, and what can end or mislead a job is believed only with the signature of a process
that knows the job's token.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

LOOPBACK = "127.0.0.1"
"""The address that other machines cannot reach."""
_DIGITS = 64
"""Hexadecimal digits of a signature."""
_TRIES = 10
"""How often what others have written is removed before a process goes by its own text."""


def new_token() -> str:
    """Return the token of a new job: 64 random hexadecimal digits."""
    return secrets.token_hex(32)


def serve_store(port: int, timeout: timedelta, loopback: bool) -> TCPStore:
    """Return a store that this process serves.

    Args:
        port: where it listens; on any free port if 0.
        timeout: how long its methods wait.
        loopback: listen on the machine's own interface alone, instead of on all networks.

    Raises: OSError or torch's DistNetworkError where the port cannot be used.
    """
    if not loopback:
        return TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout
        )  # fmt: skip
    listening = socket.create_server((LOOPBACK, port))
    number = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, number, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout,
        master_listen_fd=listening.detach(),  # the store closes it
    )  # fmt: skip


class Signer:
    """Signs what a process of a job writes, and knows what others have signed (HMAC-SHA256)."""

    def __init__(self, token: str) -> None:
        """token: what the processes of the job alone know."""
        self._token = token.encode()
        self.ignored = 0
        """Messages that no process of the job has signed."""

    def signed(self, key: str, text: str) -> str:
        """Return `text` as it is written at `key`: its signature, then the text."""
        return self._signature(key, text.encode()) + text

    def verified(self, key: str, raw: bytes) -> str | None:
        """Return the text of what stands at `key`; None, counted, where no process of the job has signed it."""
        signature, text = raw[:_DIGITS], raw[_DIGITS:]
        if hmac.compare_digest(signature, self._signature(key, text).encode()):
            return text.decode()
        self.ignored += 1
        if self.ignored == 1:
            sys.stderr.write(
                f"megamem: ignored what stands at {key!r} in the job's store, which none of its processes has written: "
                "others reach its port (docs/launching.md#who-may-reach-a-job)\n"
            )
            sys.stderr.flush()
        return None

    def _signature(self, key: str, text: bytes) -> str:
        return hmac.new(self._token, key.encode() + b"\0" + text, "sha256").hexdigest()


class Messages:
    """Signed texts in a part of a store."""

    def __init__(self, store: Store, signer: Signer, part: str) -> None:
        """part: what the keys begin with, signed too: what is read elsewhere is no message here."""
        self._store, self._signer, self._part = PrefixStore(part, store), signer, part

    def write(self, key: str, text: str) -> None:
        """Write a text, over what may be there."""
        self._store.set(key, self._signer.signed(self._name(key), text))

    def read(self, key: str) -> str | None:
        """Return the text at `key`; None if there is none."""
        if not self._store.check([key]):
            return None
        return self._signer.verified(self._name(key), self._store.get(key))

    def awaited(self, key: str) -> str | None:
        """Return the text at `key`, where something stands or soon will; None if that is no message."""
        return self._signer.verified(self._name(key), self._store.get(key))

    def write_first(self, key: str, text: str) -> str:
        """Write a text where there is none yet, and return the one that is there then: the first."""
        for _ in range(_TRIES):
            raw: bytes = self._store.compare_set(key, "", self._signer.signed(self._name(key), text))
            if (found := self._signer.verified(self._name(key), raw)) is not None:
                return found
            self._store.delete_key(key)
        return text

    def count(self, key: str, numbers: int) -> int:
        """Return how many of the keys `KEY/0` to `KEY/numbers - 1` have a text."""
        return sum(self.read(f"{key}/{number}") is not None for number in range(numbers))

    def _name(self, key: str) -> str:
        return f"{self._part}/{key}"
