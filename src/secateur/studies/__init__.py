"""The papers' tables and figures as runnable studies, one package a paper.

A package's data stand beside its code: studies, scales, printed numbers, and the claims that are judged.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_data(paper: str, name: str) -> Any:
    """Read a data file of a paper: studies, scales, printed or claims."""
    return json.loads((Path(__file__).parent / paper / f"{name}.json").read_text(encoding="utf-8"))
