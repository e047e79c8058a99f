"""The laws of the memory contract, written once and run on every registered mixer (docs/contract.md)."""
