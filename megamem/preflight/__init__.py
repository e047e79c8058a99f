"""The check before a long run: do all ranks have the same software, reach each other and compute as fast."""
