"""`python -m megamem` is the `megamem` command."""

from megamem.cli.main import main

if __name__ == "__main__":
    main()
