"""Results as one self-contained page: written when a run ends, and with what it had when a user stops it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from secateur.errors import WrongInput


@contextmanager
def page_afterwards(out: Path) -> Iterator[None]:
    """Write the page of the run in `out` after what is done inside; what was unfinished stays only where it stopped."""
    from secateur.report.page import write_page

    try:
        yield
    except KeyboardInterrupt:
        with suppress(WrongInput):  # there may be nothing yet
            write_page([out])
        raise
    shutil.rmtree(out / "unfinished", ignore_errors=True)
    write_page([out])
