"""Deep linear attention: see `deep.py`, which asks the configuration for what differs."""

from tests.contract.oracles.deep import Memory, run

__all__ = ["Memory", "run"]
