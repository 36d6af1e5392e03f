import errno
import json
import math
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import secateur
from secateur.errors import WrongInput
from secateur.runs import folder
from secateur.runs.artifacts import Result, write
from secateur.runs.folder import load_marker, load_rows, open_run
from secateur.runs.rows import Row, pack, select_comparable, unpack

ROW = Row(model="digits-cnn", dataset="digits", pruner="snip", sparsity=0.7, seed=1, metric="accuracy", value=0.5)
numbers = st.none() | st.floats()


def never():
    raise AssertionError("computed again")


def artifacts(folder):
    return {path.name: path.read_bytes() for path in (folder / "artifacts").iterdir()}


# Rows ----------------------------------------------------------------------------------------------------------
def test_a_row_is_one_flat_object_with_its_schema():
    row = replace(ROW, low=0.4, high=0.6, adaptive=False, extra={"target": 3})
    assert row.to_json() == {
        "schema": 2,
        "model": "digits-cnn",
        "dataset": "digits",
        "pruner": "snip",
        "sparsity": 0.7,
        "defense": None,
        "adaptive": False,
        "attack": None,
        "seed": 1,
        "metric": "accuracy",
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "timing": False,
        "note": None,
        "target": 3,
    }


@given(
    value=numbers, low=numbers, note=st.none() | st.text(), extra=st.dictionaries(st.text(min_size=13), st.integers())
)
def test_rows_survive_strict_json(value, low, note, extra):
    row = replace(ROW, value=value, low=low, note=note, extra=extra)
    back = Row.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False)))
    assert select_comparable([back]) == select_comparable([row])
    assert value is None or math.isnan(value) or back.value == value


def test_extra_may_not_hide_a_field():
    with pytest.raises(ValueError, match="metric"):
        replace(ROW, extra={"metric": 1})


def test_times_are_not_compared():
    assert select_comparable([ROW, replace(ROW, metric="seconds", timing=True)]) == [ROW.to_json()]


EXTRAS = st.dictionaries(st.sampled_from(["round", "client", "target", "stage", "settings", "clients"]), numbers)


@given(value=numbers, note=st.none() | st.text(), extra=EXTRAS, attack=st.none() | st.text(), timing=st.booleans())
def test_rows_survive_in_groups(value, note, extra, attack, timing):
    rows = [
        ROW,
        replace(ROW, value=value, note=note, attack=attack, timing=timing),
        replace(ROW, extra=extra, note=note),
    ]
    finite = [row for row in rows if not any(v is not None and v != v for v in [row.value, *row.extra.values()])]
    packed = json.loads(json.dumps(pack(finite)))
    assert unpack(packed) == finite


def test_what_rows_share_is_written_once(tmp_path):
    shared = {"settings": "priprune: " + ", ".join(f"lambda_{i}={i}" for i in range(60)), "clients": 539}
    note = "a caution of an attacker that does not know of the defense; " * 5
    with open_run(tmp_path, "federate", {}) as run:
        for number in range(1000):
            for metric in ("test_accuracy", "test_loss", "bytes_up", "bytes_down", "density"):
                extra = shared | {"round": number, "client": None}
                run.add([replace(ROW, metric=metric, value=1 / (number + 1), note=note, extra=extra)])
    lines = (tmp_path / "results.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) < 300 and sum(map(len, lines)) < 20e6 / 20  # of 20 000 rounds
    assert len((tmp_path / "groups.jsonl").read_bytes().splitlines()) == 2  # one group, one note
    assert load_rows(tmp_path) == run.rows


def test_folders_of_schema_1_are_read(tmp_path):
    with open_run(tmp_path, "audit", {}) as run:
        run.add([ROW, replace(ROW, extra={"target": 3}, note="few")])
    old = [row.to_json() | {"schema": 1} for row in run.rows]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    (tmp_path / "groups.jsonl").unlink()
    (tmp_path / "run.json").write_text(json.dumps(json.loads((tmp_path / "run.json").read_text()) | {"schema": 1}))
    assert load_rows(tmp_path) == run.rows


def test_rows_of_a_killed_start_can_be_read_while_the_next_one_works(tmp_path):
    with pytest.raises(RuntimeError), open_run(tmp_path, "audit", {}) as run:
        run.add(replace(ROW, model=f"net-{i}") for i in range(5))
        raise RuntimeError
    with open_run(tmp_path, "audit", {}) as run:
        run.add([replace(ROW, model="net-4")])
        run.flush()
        assert [row.model for row in load_rows(tmp_path)] == ["net-4"]
        with_old = (tmp_path / "groups.jsonl").read_text()
    assert [f"net-{i}" in with_old for i in range(5)] == [True] * 5


# The folder ----------------------------------------------------------------------------------------------------
def test_a_run_leaves_its_files(tmp_path):
    with open_run(tmp_path / "a" / "b", "audit", {"model": "mlp"}, seeds=[1, 2]) as run:
        run.stage("train", {"seed": 1}, lambda: Result({"w": torch.ones(2)}))
        run.add([ROW])
        run.write("report.html", "<html>")
    names = {p.name for p in (tmp_path / "a" / "b").iterdir()}
    rows = {"results.jsonl", "groups.jsonl", "figures.jsonl"}
    assert names == {"run.json", "config.yaml", "artifacts", "report.html", ".lock"} | rows
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == {"schema": 1, "model": "mlp"}
    assert load_rows(run.folder) == run.rows == [ROW]
    marker = json.loads((run.folder / "run.json").read_text())
    assert (marker["schema"], marker["kind"], marker["seeds"]) == (2, "audit", [1, 2])
    assert marker["torch"] == torch.__version__
    assert marker["threads"] == torch.get_num_threads()
    for name in ("secateur", "python", "numpy", "platform", "device", "started", "finished"):
        assert isinstance(marker[name], str) and marker[name], name


def test_an_error_keeps_what_was_done_and_is_not_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "audit", {}) as run:
        run.add([ROW])
        run.add([replace(ROW, seed=2)])
        raise KeyboardInterrupt
    assert [row.seed for row in load_rows(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "run.json").read_text())["finished"] is None
    with open_run(tmp_path, "audit", {}):
        pass  # the lock is free


def test_thousands_of_single_rows_are_written_once_a_second(tmp_path, monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(folder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        folder, "write", lambda path, content, **how: written.append(path.name) or write(path, content, **how)
    )
    with open_run(tmp_path, "audit", {}) as run:
        written.clear()
        for seed in range(5000):
            now[0] += 0.001
            run.add([replace(ROW, seed=seed)])
        assert 4 <= written.count("results.jsonl") <= 5
    assert [row.seed for row in load_rows(tmp_path)] == list(range(5000))


def test_a_run_without_rows_has_an_empty_table(tmp_path):
    with open_run(tmp_path, "audit", {}):
        pass
    assert load_rows(tmp_path) == []


def test_rows_of_the_same_configuration_stay_until_new_ones_come(tmp_path):
    with open_run(tmp_path, "audit", {"a": 1}) as run:
        run.add([ROW])
    with pytest.raises(RuntimeError), open_run(tmp_path, "audit", {"a": 1}):
        raise RuntimeError
    assert load_rows(tmp_path) == [ROW]
    with open_run(tmp_path, "audit", {"a": 1}) as run:
        run.add([ROW])
    assert load_rows(tmp_path) == [ROW]  # rebuilt, not doubled


def test_another_configuration_keeps_artifacts_but_not_rows(tmp_path):
    with open_run(tmp_path, "audit", {"a": 1}) as run:
        run.stage("train", {"seed": 1}, lambda: Result(data={"x": 1}))
        run.add([ROW])
        run.write("report.html", "old")
    with open_run(tmp_path, "audit", {"a": 2}) as run:
        assert load_rows(tmp_path) == []
        assert not (tmp_path / "report.html").exists()
        assert run.stage("train", {"seed": 1}, never).data == {"x": 1}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["a"] == 2


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    with open_run(tmp_path, "audit", {}):
        pass
    for left in (".run.json.0f.tmp", ".results.jsonl.0f.tmp", "artifacts/.train-00.safetensors.tmp"):
        (tmp_path / left).write_bytes(b"torn")
    with open_run(tmp_path, "audit", {}):
        assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]


def test_a_run_killed_before_its_first_file_goes_on(tmp_path):
    (tmp_path / ".lock").write_text("123")
    (tmp_path / ".run.json.0f.tmp").write_text('{"sche')
    with open_run(tmp_path, "audit", {}) as run:
        run.add([ROW])
    assert load_rows(tmp_path) == [ROW]


# Stages --------------------------------------------------------------------------------------------------------
def test_a_stage_is_computed_once_and_its_key_carries_on(tmp_path):
    with open_run(tmp_path, "audit", {}) as run:
        first = run.stage("train", {"seed": 1}, lambda: Result({"w": torch.ones(2)}, {"pair": (1, 2)}))
        second = run.stage(
            "prune", {"model": first.key, "sparsity": 0.5}, lambda: Result({"w": first.tensors["w"] * 2})
        )
    with open_run(tmp_path, "audit", {}) as run:
        again = run.stage("train", {"seed": 1}, never)
        assert run.stage("prune", {"model": again.key, "sparsity": 0.5}, never).key == second.key
        assert run.stage("prune", {"model": again.key, "sparsity": 0.7}, Result).key != second.key
    assert torch.equal(first.tensors["w"], again.tensors["w"])
    assert first.data == again.data == {"pair": [1, 2]}  # the first sees what a restart would see


def test_many_stages_compute_only_what_is_missing_in_any_order(tmp_path):
    asked = []

    def compute(missing):
        asked.append(missing)
        for index in reversed(missing):
            yield index, Result(data={"index": index})

    with open_run(tmp_path, "audit", {}) as run:
        run.stages("shadow", [{"seed": seed} for seed in (1, 3)], compute)
        results = run.stages("shadow", [{"seed": seed} for seed in (0, 1, 2, 3, 2)], compute)
        assert run.stages("shadow", [], compute) == []
    assert asked == [[0, 1], [0, 2]]  # equal stages are computed once
    assert [result.data["index"] for result in results] == [0, 0, 2, 1, 2]


def test_what_came_before_an_error_is_kept(tmp_path):
    def compute(missing):
        yield 0, Result(data={"x": 0})
        raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"), open_run(tmp_path, "audit", {}) as run:
        run.stages("shadow", [{"seed": 0}, {"seed": 1}], compute)
    with open_run(tmp_path, "audit", {}) as run:
        run.stages("shadow", [{"seed": 0}, {"seed": 1}], lambda missing: [(i, Result()) for i in missing if i == 1])


def test_a_stage_that_does_not_come_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"shadow did not compute \[1\]"), open_run(tmp_path, "audit", {}) as run:
        run.stages("shadow", [{"seed": 0}, {"seed": 1}], lambda missing: [(0, Result())])


def test_a_stage_name_stays_in_its_folder(tmp_path):
    with pytest.raises(ValueError, match="name"), open_run(tmp_path, "audit", {}) as run:
        run.stage("../train", {}, Result)


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-1] + bytes([c[-1] ^ 1])])
def test_a_damaged_artifact_is_said_and_computed_again(tmp_path, caplog, damage):
    def compute():
        return Result({"w": torch.arange(3.0)}, {"x": 1})

    with open_run(tmp_path, "audit", {}) as run:
        run.stage("train", {}, compute)
    (path,) = (tmp_path / "artifacts").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with open_run(tmp_path, "audit", {}) as run:
        result = run.stage("train", {}, compute)
    assert torch.equal(result.tensors["w"], torch.arange(3.0))
    assert path.read_bytes() == whole
    assert "damaged" in caplog.text and path.name in caplog.text


# What keeps a run out ------------------------------------------------------------------------------------------
def test_two_runs_may_not_write_one_folder(tmp_path):
    message = rf"out: .* is in use by another run \(process {os.getpid()}\)"
    with open_run(tmp_path, "audit", {}) as run:
        with pytest.raises(WrongInput, match=message), open_run(tmp_path, "audit", {}):
            pass
        run.add([ROW])
    assert load_rows(tmp_path) == [ROW]


def test_another_process_may_not_write_it_either(tmp_path):
    code = f"from secateur.runs.folder import open_run\nwith open_run({str(tmp_path)!r}, 'audit', {{}}): pass"
    with open_run(tmp_path, "audit", {}):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"in use by another run (process {os.getpid()})" in done.stderr


@pytest.mark.parametrize("name", ["photo.png", ".hidden", "config.yaml", "run.json"])
def test_a_foreign_folder_is_not_touched(tmp_path, name):
    (tmp_path / name).write_text('{"kind": "audit"}')
    with (
        pytest.raises(WrongInput, match=r"out: .* not empty and not the folder of a run"),
        open_run(tmp_path, "audit", {}),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_run_of_another_kind_or_time_is_not_touched(tmp_path):
    with open_run(tmp_path, "prune", {"a": 1}):
        pass
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with (
        pytest.raises(WrongInput, match=r"out: .* holds a run of kind prune, not audit"),
        open_run(tmp_path, "audit", {}),
    ):
        pass
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    newer = json.loads((tmp_path / "run.json").read_text()) | {"schema": 3, "secateur": "9.0"}
    (tmp_path / "run.json").write_text(json.dumps(newer))
    with pytest.raises(WrongInput, match=r"out: .* Secateur 9\.0, which is newer"), open_run(tmp_path, "prune", {}):
        pass
    with pytest.raises(WrongInput, match=r"run: .* Secateur 9\.0, which is newer"):
        load_rows(tmp_path)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(WrongInput, match=r"out: .* cannot be used"), open_run(out, "audit", {}):
            pass
        with pytest.raises(WrongInput, match=r"run: .* not the folder of a run"):
            load_rows(out)


def test_a_damaged_table_is_told(tmp_path):
    with open_run(tmp_path, "audit", {}) as run:
        run.add([ROW])
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(b'{"model": "\xff\n')
    with pytest.raises(WrongInput, match=r"run: .*results\.jsonl is damaged at line 2"):
        load_rows(tmp_path)


@contextmanager
def no_rights(folder):
    """A user who may read the folder but not write it; root has to step down for that."""
    folder.chmod(0o500)
    if os.getuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        folder.chmod(0o700)


def test_a_folder_without_permission_is_told(tmp_path):
    message = r"out: .* cannot be used \(Permission denied\)"
    with no_rights(tmp_path), pytest.raises(WrongInput, match=message), open_run(tmp_path / "run", "audit", {}):
        pass


@pytest.fixture
def small_disk(tmp_path):
    """One megabyte of real disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = os.getuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("left out: a small disk cannot be mounted here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_loses_nothing(small_disk):
    folder = small_disk / "run"

    def work(run):
        for size in (1_000, 20_000, 500_000):  # the last needs two megabytes
            result = run.stage("train", {"size": size}, lambda size=size: Result({"w": torch.ones(size)}))
            run.add([replace(ROW, seed=size, value=float(result.tensors["w"].sum()))])

    message = r"out: no space left to write .*; finished stages are saved"
    with pytest.raises(WrongInput, match=message), open_run(folder, "audit", {}) as run:
        work(run)
    assert [row.seed for row in load_rows(folder)] == [1_000, 20_000]
    assert len(artifacts(folder)) == 2
    kept = artifacts(folder)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    with open_run(folder, "audit", {}) as run:
        work(run)
    assert [row.value for row in load_rows(folder)] == [1_000, 20_000, 500_000]
    assert kept.items() <= artifacts(folder).items()


def test_a_disk_full_from_the_start_is_told(small_disk):
    with pytest.raises(OSError, match="No space"):
        (small_disk / "ballast").write_bytes(bytes(2_000_000))
    with pytest.raises(WrongInput, match=r"out: no space left"), open_run(small_disk / "run", "audit", {}):
        pass
    (small_disk / "ballast").unlink()
    with open_run(small_disk / "run", "audit", {}):
        pass


def test_importing_is_cheap():
    heavy = ["torch", "numpy", "safetensors", "pydantic", "rich", "yaml"]
    code = f"import sys, secateur.runs.folder, secateur.progress; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_one_sentence(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(WrongInput, match="has no locks"),
        open_run(tmp_path / "a", "audit", {}),
    ):
        pass


def test_a_lock_that_a_server_refuses_is_a_run_in_use(tmp_path, monkeypatch):
    def flock(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(WrongInput, match="in use by another run"), open_run(tmp_path / "a", "audit", {}):
        pass


def test_the_clock_is_read_for_dates_alone():
    """Of runs, evidence and policies. All else is measured by clocks that never go back: budgets, progress, waiting."""
    source = Path(secateur.__file__).parent
    read = re.compile(r"\btime\.time\(|datetime\.(now|utcnow|today)\(|date\.today\(|time\.localtime\(|st_[mca]time")
    readers = {str(file.relative_to(source)) for file in source.rglob("*.py") if read.search(file.read_text())}
    assert readers == {"runs/folder.py", "report/evidence.py", "cli/commands.py"}


def test_a_clock_that_was_moved_back_changes_nothing(tmp_path, monkeypatch):
    def work():
        with open_run(tmp_path / "a", "audit", {"model": "mlp"}) as run:
            calls.append(run.stage("s", {"x": 1}, lambda: Result(data={"n": len(calls)})).data)
            run.add([])

    calls = []
    work()
    monkeypatch.setattr("secateur.runs.folder._now", lambda: "1970-01-01T00:00:00+00:00")
    monkeypatch.setattr("time.time", lambda: 0.0)
    work()
    assert calls == [{"n": 0}, {"n": 0}]
    assert load_marker(tmp_path / "a")["finished"] == "1970-01-01T00:00:00+00:00"
