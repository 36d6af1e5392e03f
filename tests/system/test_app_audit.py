"""A Flower app that knows nothing of secateur, audited as it is: Adam, a filter that filters nothing, two defenses."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import secateur
from secateur.runs.folder import load_rows

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

APP = Path(__file__).parent / "adam_app"
ATTACK = "ig:tv=0.001"


def flags_of(start):
    """The flags of the line of docs/deploy.md whose flags start so; its folder of the run is the test's."""
    page = (APP.parents[2] / "docs" / "deploy.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"    secateur audit-app path/to/app {start}")]
    return [word for word in shlex.split(line, comments=True)[3:] if word not in ("--out", "runs/app")]


def audit(*arguments):
    command = [sys.executable, "-m", "secateur", "audit-app", str(APP), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=800, check=False)


def values(rows, metric, defense, attack="ig:"):
    return [
        row.value
        for row in rows
        if (row.metric, row.defense) == (metric, defense) and str(row.attack or attack).startswith(attack)
    ]


def notes(rows, metric):
    return " ".join(row.note for row in rows if row.metric == metric and row.note)


def test_pictures_of_adam_clients_come_back_and_a_filter_that_does_nothing_is_called_so(tmp_path):
    settings = "num-server-rounds=1 batch-size=1 examples=1"
    arguments = (*flags_of("--defense none,dgp"), "--out", tmp_path, "--run-config", settings, "--attack", ATTACK)
    arguments = (*arguments, "--clients", 3, "--attack-clients", 3, "--iterations", 200)
    done = audit(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = load_rows(tmp_path)
    assert max(values(rows, "psnr_max", "none")) > 15 and max(values(rows, "recognisable", "none")) == 1
    assert "1 step of 1 example (1 pass over 1) by adam, learning rate 0.001" in notes(rows, "local_steps")
    change = notes(rows, "update_change")
    assert "the app's 1 mod changes nothing" in change and "changed by dgp" in change
    assert max(values(rows, "imitation_error", "none")) < 1e-2
    assert values(rows, "bytes_up", "dgp")[-1] < 0.5 * values(rows, "bytes_up", "none")[-1]
    assert 0 <= values(rows, "test_accuracy", "none")[-1] <= 1
    assert "mod changes nothing" in (tmp_path / "report.html").read_text().replace("&#39;", "'")
    again = audit(*arguments)
    assert again.returncode == 0 and "round" not in again.stderr  # nothing is run twice
    assert [row.to_json() for row in load_rows(tmp_path)] == [row.to_json() for row in rows]


def test_pictures_of_a_batch_of_eight_come_back_partly_and_from_python(tmp_path):
    flag, settings = flags_of("--run-config")
    settings += " num-server-rounds=1 examples=8"
    effort = {"clients": 2, "attack_clients": 1, "iterations": 600, "attack": ATTACK}
    flags = [word for name, value in effort.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = audit(flag, settings, "--out", tmp_path, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    audited = secateur.audit_app(APP, tmp_path, run_config=settings, **effort)  # of the finished run
    (share,) = values(audited.rows, "recognisable", "none")
    assert 0 < share <= 1  # of 32 pictures 25 were recognisable with four clients
    assert "1 step of 8 examples (1 pass over 8) by adam" in audited.findings["none"][0]


def test_three_rounds_of_a_client_are_one_target_and_show_more_than_the_last_one(tmp_path):
    settings = {"run_config": "num-server-rounds=3 batch-size=8 examples=8", "clients": 2, "attack_clients": 1}
    attacks = [ATTACK, f"{ATTACK}:rounds=3"]
    rows = secateur.audit_app(APP, tmp_path, attack=attacks, attack_at="3", iterations=300, **settings).rows
    last, joined = (
        [row for row in rows if row.metric == "psnr" and ("rounds=3" in str(row.attack)) == j] for j in (0, 1)
    )
    assert [(row.extra["history"], row.extra["same_rows"]) for row in joined] == [(3, True)]
    assert "that a client's last 3 rounds are of the same rows" in joined[0].extra["knows"]
    assert joined[0].value > last[0].value + 2  # 23.2 and 17.2 dB were measured


@pytest.mark.parametrize(
    "who, words", [("client", "the disk of this client is full"), ("server", "the license of this server is over")]
)
def test_an_app_that_fails_is_quoted(tmp_path, who, words):
    settings = f'num-server-rounds=1 fault="{who}"'
    done = audit("--out", tmp_path, "--run-config", settings, "--clients", 3, "--attack-clients", 1)
    assert done.returncode == 2 and words in done.stderr.splitlines()[-1], done.stderr[-3000:]
