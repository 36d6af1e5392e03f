"""The example that a stranger follows: the bytes fall, and only a server that knows of the line sees pictures."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "examples" / "flower-quickstart" / "compare.py"


def test_bytes_fall_and_only_who_knows_of_the_defense_sees_pictures(tmp_path):
    command = [sys.executable, str(SCRIPT), "--iterations", "200", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"^(\w+): (\d+ bytes up, PSNR -?[\d.]+) dB", done.stdout, re.MULTILINE))
    plain, defended = ([float(n) for n in re.findall(r"-?[\d.]+", found[name])] for name in ("plain", "defended"))
    assert defended[0] < 0.25 * plain[0]
    assert plain[1] > 20 > 10 > defended[1]
    knowing = re.search(r"the server knows of DGP: PSNR (-?[\d.]+) dB", done.stdout)
    assert float(knowing[1]) > 20  # the same bytes
    assert all((tmp_path / name / "report.html").exists() for name in found)
