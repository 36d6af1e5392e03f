"""`python -m secateur`."""

from secateur.cli import entry

entry()
