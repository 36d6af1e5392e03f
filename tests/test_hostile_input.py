"""Values, names and files that end a command: one sentence and exit code 2, never a traceback or a forged line."""

import io
import json
import logging
import os
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from secateur.cli import main
from secateur.cli.exits import guard
from secateur.data.mnist import _read_users
from secateur.errors import WrongInput, printable
from secateur.models.create import create
from secateur.progress import progress
from secateur.runs.rows import Row

AUDIT = ["audit", "--device", "cpu", "--dry-run"]
FORGED = "a\x1b[31mb\nsecateur: within the limits"
LONG = "x" * 300


def npy(header, body=b""):
    text = header.encode() + b" " * (-(11 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def npz(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return str(path)


def array(values):
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def refused(arguments, capsys):
    """Return the one sentence of a command that must be refused."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert "\x1b" not in said.err + said.out
    (line,) = said.err.splitlines()
    assert line.startswith("secateur: ")
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "seeds=1000000000"],
        ["--seeds", "1000000000"],
        ["--set", "threads=100000"],
        ["--shadows", "1000000000"],
        ["--in-out", "1000000000"],
        ["--set", "examples=" + "9" * 30],
        ["--set", "train.epochs=" + "9" * 30],
        ["--data", f"{LONG}.npz"],
        ["--data", f"/tmp/{LONG}/{LONG}"],
        ["--weights", f"{LONG}.pt"],
        ["--data", "~nosuchuser/x.npz"],
        ["--data", "cifar10", "--data-folder", "~nosuchuser/x"],
        ["--weights", "~nosuchuser/x.pt"],
        ["--data", "a\udcff.npz"],
        ["--out", "a\udcff"],
        ["--data", FORGED],
        ["--model", FORGED],
        ["--weights", FORGED],
        ["--set", f"{FORGED}=1"],
    ],
    ids=lambda arguments: " ".join(arguments)[:24].encode("ascii", "replace").decode(),
)
def test_a_value_that_cannot_be_used_is_one_sentence(arguments, capsys):
    refused([*AUDIT, *arguments], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "1000000000"],
        ["--local-steps", "1000000000"],
        ["--clients", "1000000000"],
        ["--clients", "1000000000", "--partition", "dirichlet-labels"],
        ["--clients", "1000000000", "--partition", "dirichlet-sizes"],
    ],
    ids=" ".join,
)
def test_a_federation_that_no_memory_holds_is_refused(arguments, capsys):
    refused(["federate", "--device", "cpu", "--dry-run", *arguments], capsys)


@pytest.mark.parametrize(
    "header", ["{[]:1}", "{'shape': ()}", "[1]", "{'descr': '<f4', 'fortran_order': 1, 'shape': 3}"]
)
def test_an_array_with_a_forged_header_is_one_sentence(header, tmp_path, capsys):
    file = npz(tmp_path / "a.npz", inputs=npy(header), labels=array(np.arange(4)))
    assert "a.npz is truncated, damaged or unreadable" in refused([*AUDIT, "--data", file], capsys)


def test_an_empty_member_is_one_sentence(tmp_path, capsys):
    file = npz(tmp_path / "a.npz", inputs=b"", labels=array(np.arange(4)))
    assert "damaged" in refused([*AUDIT, "--data", file], capsys)


def test_a_name_inside_a_file_prints_no_line_of_its_own(tmp_path, capsys):
    file = npz(tmp_path / "a.npz", **{FORGED: array(np.ones((4, 2))), "labels": array(np.arange(4))})
    assert "\\x1b[31mb\\nsecateur" in refused([*AUDIT, "--data", file], capsys)


@pytest.mark.parametrize("labels", [np.arange(40) % 2 + 0.5, np.array(["a"] * 40), np.ones((40, 2), int)])
def test_labels_that_are_no_whole_numbers_are_refused(labels, tmp_path, capsys):
    file = npz(tmp_path / "a.npz", inputs=array(np.ones((40, 3))), labels=array(labels))
    assert "labels" in refused([*AUDIT, "--data", file], capsys)


@pytest.mark.parametrize(
    "users",
    [
        {"a": {"x": [[0.0] * 784], "y": [10**30]}},
        {"a": {"x": [[0.0] * 784], "y": [1.5]}},
        {"a": {"x": [[0.0] * 784], "y": [62]}},
        {"a": {"x": [[float("nan")] * 784], "y": [1]}},
        {"a": {"x": [[0.0] * 783], "y": [1]}},
        {"a": {"x": [[0.0] * 784], "y": 1}},
        {"a": None},
        [],
        None,
    ],
    ids=["large", "fraction", "class", "nan", "pixels", "no list", "null", "list", "nothing"],
)
def test_a_file_of_leaf_that_is_not_right_is_one_sentence(users, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"user_data": users}))
    with pytest.raises(WrongInput, match="not a file of LEAF"):
        _read_users(tmp_path / "a.json")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64], ids=str)
def test_an_update_of_other_numbers_is_refused(dtype, tmp_path, capsys):
    net = create("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0))
    tensors = {name: torch.full_like(value, 0.01) for name, value in net.named_parameters()}
    first = next(iter(tensors))
    update = tmp_path / "update.safetensors"
    save_file(tensors | {first: tensors[first].to(dtype)}, update, metadata={"kind": "gradient"})
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    command = ["invert", "--model", "mlp", "--weights", tmp_path / "w.safetensors", "--update", update]
    assert first in refused([*command, "--device", "cpu", "--dry-run"], capsys)


def test_complex_weights_are_refused(tmp_path, capsys):
    net = create("mlp", (1, 8, 8), 10, torch.Generator().manual_seed(0))
    state = net.state_dict()
    first = next(iter(state))
    save_file(state | {first: state[first].to(torch.complex64)}, tmp_path / "w.safetensors")
    assert f"complex: {first}" in refused([*AUDIT, "--model", "mlp", "--weights", tmp_path / "w.safetensors"], capsys)


@pytest.mark.parametrize("classes", [(1, 1), (4, 3), (3, 4)])
def test_saved_predictions_of_other_classes_than_the_shadows(classes, tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix, number in zip(("", "shadow_"), classes, strict=True):
        answers = rng.random((60, number)) + 0.1
        arrays |= {f"{prefix}probabilities": answers / answers.sum(1, keepdims=True)}
        arrays |= {f"{prefix}labels": np.arange(60) % number, f"{prefix}membership": np.arange(60) % 2}
    np.savez(tmp_path / "p.npz", **arrays)
    command = ["audit", "--predictions", str(tmp_path / "p.npz"), "--attack", "conf,blindmi,samia,nn-cls,rmia"]
    code = main([*command, "--out", str(tmp_path / "run")])
    assert code == (0 if classes == (1, 1) else 2), capsys.readouterr().err


def test_an_unreadable_path_is_one_sentence_whoever_meets_it(capsys):
    def command():
        raise PermissionError(13, "Permission denied", f"/root/{FORGED}")

    assert guard(command) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "path: /root/a\\x1b[31mb\\nsecateur" in said and "Permission denied" in said


def test_rows_logs_and_progress_hold_no_escapes(capfd):
    row = Row(model=FORGED, dataset="d", seed=0, metric="auc", value=0.5, note=FORGED, extra={"item": FORGED})
    assert row.model == row.note == row.extra["item"] == printable(FORGED)

    def command():
        logging.getLogger("secateur.test").warning("ignoring %s", FORGED)
        with progress(FORGED, 1) as advance:
            advance(1)

    handlers, root = logging.getLogger().handlers[:], logging.getLogger()
    root.handlers = []
    try:
        assert guard(command) == 0
    finally:
        root.handlers = handlers
    said = capfd.readouterr().err
    assert "\x1b" not in said and said.count("\n") == 2


@pytest.mark.parametrize("text", ["plain ± text", "日本", "a\tb", "\u202eevil", "\udcff", "\x9b31m"])
def test_printable_text_stays_and_other_text_is_written_out(text):
    assert printable(text).isprintable()
    assert (printable(text) == text) == text.isprintable()


def test_a_terminal_of_ascii_shows_everything():
    code = "from secateur.cli.exits import guard\nguard(lambda: print('1 \\xb1 2'))"
    shown = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True
    )
    assert shown.stdout == b"1 \\xb1 2\n"


def test_without_a_home_the_data_folder_is_asked_for(monkeypatch, capsys):
    for name in ("HOME", "XDG_CACHE_HOME", "SECATEUR_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as where the user has no entry either
    assert main([*AUDIT, "--pruner", "none", "--attack", "conf"]) == 0
    capsys.readouterr()
    assert "data_folder: is missing" in refused([*AUDIT, "--data", "cifar10"], capsys)


def test_both_streams_closed_leave_the_exit_code():
    code = "import sys\nfrom secateur.cli.exits import guard\n"
    code += "sys.exit(guard(lambda: [print('x' * 9999) for _ in range(99)]))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()
    assert process.wait(timeout=60) == 0


def test_a_batchnorm_with_one_row_is_one_sentence(tmp_path, monkeypatch, capsys):
    text = "nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))"
    (tmp_path / "one_row.py").write_text(f"from torch import nn\n\ndef net():\n    return {text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["federate", "--model", "one_row:net", "--batch-size", "1", "--rounds", "1", "--clients", "2"]
    assert main([*command, "--per-round", "1", "--device", "cpu", "--out", str(tmp_path / "run")]) == 2
    assert "batch_size: 1 row is too few for a BatchNorm" in capsys.readouterr().err
