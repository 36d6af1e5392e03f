"""`python -m secateur`, and the installed command: an interruption while it is still being imported says so too."""

from __future__ import annotations

import sys


def main() -> None:
    """Import and run the command."""
    try:
        from secateur.cli import entry
    except KeyboardInterrupt:
        print("secateur: interrupted; nothing was begun", file=sys.stderr)
        sys.exit(130)
    entry()


if __name__ == "__main__":
    main()
