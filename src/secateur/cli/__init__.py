"""The command line."""

from secateur.cli.commands import STRONGER, app, entry, main

__all__ = ["STRONGER", "app", "entry", "main"]
