"""`python -m dropless.parity` is the `dropless` command."""

from .cli import main

if __name__ == "__main__":
    main()
