"""The `megamem` command: one file per verb."""
