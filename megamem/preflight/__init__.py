"""The check before a long run that all ranks have the same software, reach each other and compute as fast."""
