import os
import pty
import re
import subprocess
import sys

import pytest

from secateur.progress import progress

NESTED = """
import time
from secateur.progress import progress
with progress("models", 2) as outer:
    for _ in range(2):
        with progress("epochs", 4) as inner:
            for _ in range(4):
                time.sleep(0.1)
                inner(1)
        outer(1)
with progress("again", 100, rate=True) as advance:
    for _ in range(10):
        time.sleep(0.05)
        advance(10)
"""


def test_one_line_and_nothing_on_stdout_where_there_is_no_terminal(capsys):
    with progress("shadows", 3) as advance:
        for _ in range(3):
            advance(1)
    with progress("reading"):
        pass
    with progress("a federation", 1, unit="rounds"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "shadows: 3 steps\nreading\na federation: 1 round\n"


def test_a_log_has_a_line_now_and_then_with_the_time_left(capsys, monkeypatch):
    """Finding 10: logs without a terminal had one line a stage."""
    clock = [0.0]
    monkeypatch.setattr("secateur.progress.time.monotonic", lambda: clock[0])
    with progress("dlg on target 0", 300, unit="iterations") as advance:
        for _ in range(100):
            clock[0] += 1
            advance(1)
    assert capsys.readouterr().err.splitlines() == [
        "dlg on target 0: 300 iterations",
        "dlg on target 0: 30 of 300 iterations, about 4 min left",
        "dlg on target 0: 60 of 300 iterations, about 4 min left",
        "dlg on target 0: 90 of 300 iterations, about 4 min left",
    ]
    with progress("dlg on target 0", 20, unit="iterations") as advance:
        for _ in range(30):
            clock[0] += 1
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["dlg on target 0: 30 of 20 iterations"], "trials began again: nobody knows what is left"


LONG = """
import time
from secateur.progress import progress
with progress("prunefl", 20_000, rate=True) as advance:
    for number in range(10):
        time.sleep(0.1)
        advance(1_234, "prunefl, priprune, seed 0: round 20000, accuracy 0.103, 484.9 MB up, best PSNR 9.74")
"""


def on_a_terminal(script, columns):
    """What a script shows on stderr; nothing may come on stdout."""
    terminal, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(terminal, 4096):
            shown += part
    except OSError:
        pass  # how Linux says that a terminal's last writer is gone
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    return shown.decode()


@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_terminal_cuts_neither_words_nor_the_time_left(columns):
    text = on_a_terminal(LONG, columns)
    assert "\u2026" not in text  # an ellipsis
    assert re.search(r"\d{4,5}/20000 +\d+\.\d/s +\d:\d\d:\d\d", text), text
    assert all(word in text for word in ("priprune", "accuracy", "484.9", "PSNR"))


def test_bars_with_time_left_on_a_real_terminal():
    text = on_a_terminal(NESTED, 100)
    for expected in ("models", "epochs", "again", "1/2", "2/4", "0:00:0"):
        assert expected in text, text
    models, again = text.split("again", 1)
    assert re.search(r"\d+\.\d/s", again) and "/s" not in models  # steps a second where they are asked for
