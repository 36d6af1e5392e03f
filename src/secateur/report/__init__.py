"""Results as one self-contained page, written when a run ends or a user stops it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from secateur.errors import WrongInput


@contextmanager
def page_afterwards(out: Path) -> Iterator[None]:
    """Write the page of the run in `out` after the body; keep unfinished work only if the user stopped the run."""
    from secateur.report.page import write_page

    try:
        yield
    except KeyboardInterrupt:
        with suppress(WrongInput):  # there may be no rows yet
            write_page([out])
        raise
    shutil.rmtree(out / "unfinished", ignore_errors=True)
    write_page([out])
