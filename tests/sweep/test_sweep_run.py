"""A sweep without Ray: what a worker does, what comes back, what is gathered, and what is not run again."""

import fcntl
import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from secateur.cli import main
from secateur.config import Sweep
from secateur.errors import WrongInput, install_command
from secateur.runs.folder import load_figures, load_rows
from secateur.runs.rows import select_comparable
from secateur.sweep import run
from secateur.sweep import workers as sweep_workers
from secateur.sweep.plan import plan
from secateur.sweep.workers import PieceOutcome, SweepFolder, run_piece

SMALL = {"clients": 4, "per_round": 2, "local_steps": 1, "batch_size": 4, "base_pruning": "random", "examples": 200}
ROUNDS = {"job": "federate", "model": "lenet-zhu", "rounds": 2, **SMALL}


@pytest.fixture
def here(monkeypatch):
    """Pieces run in this process, one after the other; the list of those that were."""
    ran = []

    def one_by_one(pieces, home, watch, address, workers):
        for piece in pieces:
            ran.append(piece.name)
            watch.note_start(piece)
            watch.note_end(piece, run_piece(piece, home))

    monkeypatch.setattr(run, "spread", one_by_one)
    return ran


def sweep(tmp_path, fields, *flags):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    return main(["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), *flags])


def entries(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "pieces.jsonl").read_text().splitlines()]


def test_rows_are_those_of_the_pieces_and_nothing_is_run_twice(tmp_path, here, capsys):
    fields = {**ROUNDS, "grid": {"learning_rate": [0.1, 0.2]}, "seeds": 2}
    assert sweep(tmp_path, fields) == 0
    assert "4 of 4 done, 0 running, 0 failed" in capsys.readouterr().err
    out = tmp_path / "out"
    names = [entry["name"] for entry in entries(tmp_path)]
    assert here == names and len(names) == 4
    alone = []
    for piece in plan(Sweep.model_validate(fields)):
        sweep_workers.run_job(piece, tmp_path / "alone" / piece.name)
        rows = load_rows(tmp_path / "alone" / piece.name)
        alone += [replace(row, extra=row.extra | {"run": piece.run}) for row in rows]
    assert select_comparable(load_rows(out)) == select_comparable(alone)
    assert {figure["run"] for figure in load_figures(out)} <= {entry["run"] for entry in entries(tmp_path)}
    page = (out / "report.html").read_text()
    assert re.findall(r"<summary>(.*?): configuration", page) == [
        "federate-learning_rate=0.1",
        "federate-learning_rate=0.2",
    ]

    before = select_comparable(load_rows(out))
    assert sweep(tmp_path, fields, "--json") == 0  # nothing is left to do
    assert here == names and select_comparable(load_rows(out)) == before
    assert len(json.loads(capsys.readouterr().out)) == len(load_rows(out))
    assert [entry["starts"] for entry in entries(tmp_path)] == [0] * 4

    fields["grid"]["learning_rate"] = [0.1, 0.4]  # what stays the same is kept
    assert sweep(tmp_path, fields) == 0
    assert here[4:] == [f"federate-learning_rate=0.4-seed={seed}" for seed in (0, 1)]
    assert {row.extra["run"] for row in load_rows(out)} == {f"federate-learning_rate={x}" for x in (0.1, 0.4)}


def test_a_piece_that_fails_is_named_and_the_others_go_on(tmp_path, here, capsys, monkeypatch):
    jobs = {"wrong": {"job": "audit", "model": "mlp", "pruner": "slimming"}, "right": ROUNDS, "torn": ROUNDS}
    run = sweep_workers.run_job

    def torn(piece, out):
        if piece.name == "torn":
            raise RuntimeError("no such luck")
        run(piece, out)

    monkeypatch.setattr(sweep_workers, "run_job", torn)
    assert sweep(tmp_path, {"jobs": jobs}) == 70
    said = capsys.readouterr().err
    assert "secateur: wrong failed: pruner: slimming needs BatchNorm" in said
    assert "secateur: torn failed: RuntimeError: no such luck" in said and "Traceback" not in said
    states = {entry["name"]: entry for entry in entries(tmp_path)}
    assert [states[name]["state"] for name in jobs] == ["failed", "done", "failed"]
    assert "in torn" in states["torn"]["trace"] and states["wrong"]["trace"] is None
    assert {row.extra["run"] for row in load_rows(tmp_path / "out")} == {"right"}
    assert "wrong (missing)" in (tmp_path / "out" / "report.html").read_text()

    monkeypatch.setattr(sweep_workers, "run_job", run)
    jobs["wrong"]["pruner"], jobs["wrong"]["model"] = "none", "digits-cnn"
    jobs["wrong"] |= {"shadows": 1, "train": {"epochs": 1}, "attack": "conf", "limits": {"auc": 0.0}, "examples": 400}
    assert sweep(tmp_path, {"jobs": jobs}) == 1  # done, and a limit is passed
    assert here[3:] == ["wrong", "torn"]
    assert "secateur: wrong: " in (said := capsys.readouterr().err) and "is above the limit 0" in said
    assert "wrong: the original, basic: above the limit: AUC" in (tmp_path / "out" / "report.html").read_text()


def test_where_no_piece_is_done_there_is_no_page(tmp_path, here):
    assert sweep(tmp_path, {"job": "audit", "model": "mlp", "pruner": "slimming"}) == 70
    assert not (tmp_path / "out" / "report.html").exists() and load_rows(tmp_path / "out") == []


def test_a_stopped_sweep_keeps_what_is_done(tmp_path, here, monkeypatch, capsys):
    def stopped(pieces, home, watch, address, workers):
        watch.note_end(pieces[0], run_piece(pieces[0], home))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "spread", stopped)
    assert sweep(tmp_path, ROUNDS | {"seeds": 2}) == 130
    assert "rerun the same command to resume" in capsys.readouterr().err
    assert {row.seed for row in load_rows(tmp_path / "out")} == {0}
    assert (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out" / "pieces" / ".home").exists()


def test_without_a_shared_disk_the_folder_comes_back(tmp_path, here, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    monkeypatch.setattr(sweep_workers.tempfile, "tempdir", None)  # read anew
    (tmp_path / "other").mkdir()
    (piece,) = plan(Sweep.model_validate(ROUNDS))
    home = SweepFolder(tmp_path / "elsewhere", "a token of another disk", tmp_path / "nowhere")
    outcome = run_piece(piece, home)
    assert outcome.error is None and {"results.jsonl", "config.yaml", "report.html"} <= outcome.files.keys()
    assert any(name.startswith("artifacts/") for name in outcome.files)
    assert not sweep_workers.local_folder(piece).exists() and not (tmp_path / "elsewhere").exists()

    real = run.create_folder
    monkeypatch.setattr(run, "create_folder", lambda out: replace(real(out), token="another"))
    assert sweep(tmp_path, ROUNDS) == 0
    sweep_workers.run_job(piece, tmp_path / "alone")
    back = tmp_path / "out" / "pieces" / piece.name
    assert select_comparable(load_rows(back)) == select_comparable(load_rows(tmp_path / "alone"))
    assert {path.name for path in back.glob("artifacts/*")} == {
        path.name for path in (tmp_path / "alone").glob("artifacts/*")
    }


def test_another_users_folder_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_workers.tempfile, "gettempdir", lambda: str(tmp_path))
    (piece,) = plan(Sweep.model_validate(ROUNDS))
    (tmp_path / "mine").mkdir()
    (tmp_path / f"secateur-{sweep_workers.os.getuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(WrongInput, match="belongs to another user"):
        sweep_workers.local_folder(piece)


def test_a_folder_that_is_still_held_is_waited_for(tmp_path):
    sweep_workers.wait_until_free(tmp_path / "new")  # there is nothing to wait for
    lock = (tmp_path / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    begun = time.monotonic()
    sweep_workers.wait_until_free(tmp_path, patience=0.3)
    assert time.monotonic() - begun >= 0.3  # the run itself says then who holds it
    threading.Timer(0.3, lock.close).start()
    begun = time.monotonic()
    sweep_workers.wait_until_free(tmp_path)
    assert 0.2 < time.monotonic() - begun < 30


class Died(Exception):
    """As Ray says that a worker died."""


def fake_ray(answers):
    """Ray with two CPUs whose tasks end at once, each with the next of the answers."""

    class Task:
        def options(self, **needs):
            return self

        def remote(self, piece, home):
            return object()

    def get(ref):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    return SimpleNamespace(
        remote=lambda max_retries: lambda function: Task(),
        wait=lambda refs, timeout: (refs[:1], refs[1:]),
        get=get,
        cluster_resources=lambda: {"CPU": 2.0},
        exceptions=SimpleNamespace(RayTaskError=type("RayTaskError", (Died,), {}), RayError=Died),
    )


class Heard:
    """Notes how many pieces run, and what ended how."""

    def __init__(self):
        self.running, self.most, self.deaths, self.outcomes = 0, 0, [], {}

    def note_start(self, piece):
        self.running += 1
        self.most = max(self.most, self.running)

    def note_death(self, piece, starts, reason):
        self.running -= 1
        self.deaths.append((piece.name, starts))

    def note_end(self, piece, outcome):
        self.running -= 1
        self.outcomes[piece.name] = outcome.error


def spread(monkeypatch, pieces, answers, workers=None):
    @contextmanager
    def connected(address, cpus):
        yield fake_ray(answers)

    monkeypatch.setattr(sweep_workers, "connected", connected)
    heard = Heard()
    sweep_workers.spread(pieces, SweepFolder(None, "", None), heard, None, workers)
    return heard


def test_a_piece_whose_worker_dies_is_started_again_but_not_for_ever(monkeypatch):
    pieces = plan(Sweep.model_validate(ROUNDS | {"seeds": 2}))
    done = PieceOutcome("vm", 1.0)
    heard = spread(monkeypatch, pieces, [Died("killed"), done, done])
    assert heard.deaths == [("federate-seed=0", 1)] and set(heard.outcomes.values()) == {None}
    heard = spread(monkeypatch, pieces[:1], [Died("killed")] * sweep_workers.STARTS)
    assert [starts for _, starts in heard.deaths] == [1, 2, 3]
    assert heard.outcomes == {"federate-seed=0": "its worker died 4 times"}


def test_as_many_at_once_as_there_is_room_for(monkeypatch):
    pieces = plan(Sweep.model_validate(ROUNDS | {"seeds": 5}))
    answers = [PieceOutcome("vm", 1.0)] * 5
    assert spread(monkeypatch, pieces, answers[:]).most == 2
    assert spread(monkeypatch, pieces, answers[:], workers=1).most == 1
    wide = plan(Sweep.model_validate(ROUNDS | {"seeds": 5, "cpus": 2}))
    assert spread(monkeypatch, wide, answers[:]).most == 1


@pytest.mark.parametrize("field", ["cpus", "gpus"])
def test_a_piece_that_never_fits_is_refused(monkeypatch, field):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(WrongInput, match=rf"{field}: 3 for federate is more than this machine's"):
        spread(monkeypatch, plan(Sweep.model_validate(ROUNDS | {field: 3})), [])


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "address: no Ray cluster answers at 127.0.0.1:1"),
        ("head", "address: 'head' is not readable; use host:port, or auto"),
        ("127.0.0.1:99999999", "address: no Ray cluster answers"),
    ],
)
def test_a_cluster_that_does_not_answer_is_said_at_once(tmp_path, capsys, address, sentence):
    pytest.importorskip("ray")
    assert sweep(tmp_path, ROUNDS, "--address", address) == 2
    assert sentence in capsys.readouterr().err


def test_without_ray_the_extra_is_named(tmp_path, capsys, hide):
    hide("ray")
    assert sweep(tmp_path, ROUNDS) == 2
    assert install_command("ray") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
