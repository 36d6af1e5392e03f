"""Flower's SecAgg+ in its simulation: the sum is the plain average, the auditor sees the sum alone, noise hides it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "examples" / "flower-quickstart" / "secure_sum.py"


def test_the_server_sees_a_sum_which_gives_pictures_away_until_noise_is_added(tmp_path):
    command = [sys.executable, str(SCRIPT), "--iterations", "150", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = r"^(\w+): the server saw the sum of 4 clients, (\S+) from the plain average; PSNR (-?[\d.]+) dB"
    found = {name: (float(far), float(psnr)) for name, far, psnr in re.findall(line, done.stdout, re.MULTILINE)}
    step = float(re.search(r"a step of the quantisation: (\S+)", done.stdout)[1])
    assert found["sum"][0] < step < 1e-5 and found["noisy"][0] > 100 * step
    assert found["sum"][1] > 20 > 10 > found["noisy"][1]  # four pictures of one sum
    assert "epsilon 4.729 at delta 1e-05 (rdp) for a client's 1 round, where the server sees the sum" in done.stdout
    page = (tmp_path / "noisy" / "report.html").read_text()
    assert "the sum of 4 clients" in page and "epsilon 4.729" in page
    rows = (tmp_path / "sum" / "groups.jsonl").read_text() + (tmp_path / "sum" / "results.jsonl").read_text()
    assert '"view":"sum"' in rows and '"client":null' in rows
