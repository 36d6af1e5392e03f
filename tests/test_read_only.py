"""A disk that cannot be written, and a folder that another process uses: one sentence before any work."""

import errno
import os
import shutil
import subprocess

import numpy as np
import pytest

from secateur.cli import main
from secateur.runs.folder import open_run
from secateur.runs.rows import Row

POLICY = "name: release\nset_on: 2026-11-01\nlimits: {auc: .9}\n"
SWEEP = "jobs:\n  a: {job: audit, model: mlp, shadows: 1, attack: conf}\n"
ROW = Row(model="mlp", dataset="digits", seed=0, metric="auc", value=0.5, attack="conf")
WRITES = {
    "audit": "audit --out {disk}/run",
    "audit resumed": "audit --out {disk}/finished",
    "audit of predictions": "audit --predictions {here}/p.npz --out {disk}/run",
    "audit exports": "audit --export {disk}/models --out {here}/run --shadows 1 --attack conf --pruner none"
    " --set train.epochs=1 --set examples=200",
    "recommend": "recommend --out {disk}/run",
    "recommend exports": "recommend --export {disk}/models --out {here}/run --candidates 2 --set examples=200",
    "audit's junit": "audit --predictions {here}/p.npz --out {here}/run --junit {disk}/j.xml",
    "invert": "invert --out {disk}/run",
    "federate": "federate --out {disk}/run",
    "prune": "prune --out {disk}/model.safetensors",
    "reproduce": "reproduce dgp-table1 --scale tiny --out {disk}/run",
    "matrix": "reproduce matrix --scale tiny --out {disk}/run",
    "sweep": "sweep {here}/sweep.yaml --out {disk}/run",
    "init": "init --model mlp --data digits --out {disk}/audit.yaml",
    "report": "report {disk}/finished",
    "report to a file": "report {here}/finished --out {disk}/page.html",
    "archive": "report {here}/finished --rows {disk}/a.jsonl.xz --commit abc1234",
    "evidence": "report {disk}/finished --format md,json",
    "gate's summary": "gate {disk}/finished --policy {here}/policy.yaml --summary {disk}/s.md",
    "gate's sarif": "gate {disk}/finished --policy {here}/policy.yaml --sarif {disk}/s.sarif",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    (folder / "policy.yaml").write_text(POLICY)
    (folder / "sweep.yaml").write_text(SWEEP)
    answers = np.random.default_rng(0).dirichlet((1, 1), 40)
    np.savez(folder / "p.npz", probabilities=answers, labels=np.arange(40) % 2, membership=np.arange(40) < 20)
    with open_run(folder / "finished", "audit", {"model": "mlp"}, seeds=[0]) as run:
        run.add([ROW])
    return folder


@pytest.fixture(scope="module")
def disk(here, tmp_path_factory):
    """A disk with a finished run that is mounted read-only; without the right to mount, a folder without write access.

    Access rights do not stop root, and only root may mount.
    """
    folder = tmp_path_factory.mktemp("disk")
    root = os.geteuid() == 0
    if root and subprocess.run(["mount", "-t", "tmpfs", "secateur-test", folder], capture_output=True).returncode:
        pytest.skip("left out: root may not mount here, and access rights do not stop root")
    try:
        shutil.copytree(here / "finished", folder / "finished")
        if root:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        else:
            for path in (folder, folder / "finished"):
                path.chmod(0o500)
        with pytest.raises(OSError):
            (folder / "x").touch()
        yield folder
    finally:
        if root:
            subprocess.run(["umount", "--lazy", folder], check=True)
        else:
            for path in (folder, folder / "finished"):
                path.chmod(0o700)


@pytest.mark.parametrize("name", WRITES)
def test_a_command_that_writes_says_that_it_cannot(name, here, disk, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.relative_to(disk) for path in disk.rglob("*"))
    shutil.rmtree(here / "run", ignore_errors=True)
    assert main(WRITES[name].format(disk=disk, here=here).split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
    assert len(said) == 1 and str(disk) in said[0] and "internal" not in said[0]
    assert sorted(path.relative_to(disk) for path in disk.rglob("*")) == before and not list(tmp_path.iterdir())
    assert not list(here.glob("run/artifacts/*")), "work was done before"


def test_a_disk_that_becomes_read_only_keeps_what_was_finished(here, tmp_path, capsys, monkeypatch):
    """As a file system does after an error of its device."""
    folder, opened, calls = tmp_path / "run", os.open, []

    def refuse(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(folder)):
            calls.append(path)
            if len(calls) > limit:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest, **options)

    arguments = ["audit", "--predictions", str(here / "p.npz"), "--out", str(folder)]
    limit = 10**9
    monkeypatch.setattr(os, "open", refuse)
    assert main(arguments) == 0
    rows, number = (folder / "results.jsonl").read_bytes(), len(calls)
    for limit in range(0, number, 5):
        shutil.rmtree(folder)
        calls.clear()
        capsys.readouterr()
        assert main(arguments) == 2
        assert "Read-only file system" in capsys.readouterr().err
        limit = 10**9
        assert main(arguments) == 0 and (folder / "results.jsonl").read_bytes() == rows
        assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize(
    "command",
    [
        "recommend --out {run}",
        "reproduce matrix --scale tiny --out {run}",
        "report {here}/finished --rows {run}.jsonl.xz",
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(command, here, tmp_path, capsys, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert main(command.format(run=tmp_path / "run", here=here).split()) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
    assert len(said) == 1 and f"no space left to write {tmp_path}/run" in said[0]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {".lock"}


@pytest.mark.parametrize("command", ["audit", "invert", "federate", "recommend", "sweep {here}/sweep.yaml"])
def test_a_folder_that_another_run_uses_is_refused(command, here, tmp_path, capsys):
    """A lock belongs to an open file, so that this process stands for two (tests/runs/test_folder.py has a second)."""
    folder = tmp_path / "run"
    with open_run(folder, command.split()[0], {"model": "mlp"}, seeds=[0]):
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        assert main([*command.format(here=here).split(), "--out", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"out: {folder} is in use by another run (process {os.getpid()}); use another folder" in said
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
