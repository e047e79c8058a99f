"""Ports for servers that tests start."""

import random
import socket


def free_port() -> int:
    """One that nothing listens on, below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
        return port
