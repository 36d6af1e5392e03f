"""`python -m secateur`."""

from __future__ import annotations

from secateur.cli import entry

entry()
