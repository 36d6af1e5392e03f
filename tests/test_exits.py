"""However a command ends: its exit code, one sentence, and what was finished is kept."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from secateur.cli import main
from secateur.experiments import audit, audit_evaluation
from secateur.runs.folder import load_rows

ENFORCED = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory:"
TINY = ["audit", "--device", "cpu", "--pruner", "l1-unstructured", "--shadows", "1", "--attack", "conf"]
TINY += ["--set", "train.epochs=1", "--set", "finetune.epochs=1", "--set", "examples=400"]


def failing(monkeypatch, error):
    """Let the second victim's measurement fail."""
    measure, calls = audit_evaluation.AuditEvaluation.measure_attack, []

    def fails(self, duel, attack):
        calls.append(duel)
        if len(calls) == 2:
            raise error
        measure(self, duel, attack)

    monkeypatch.setattr(audit_evaluation.AuditEvaluation, "measure_attack", fails)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyError("lost"), 70, "internal error (KeyError: 'lost')"),
        (MemoryError("Unable to allocate 7 GiB"), 70, "out of memory (Unable to allocate 7 GiB)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"),
            70,
            "out of memory (tried to allocate 2 GiB)",
        ),
        (RuntimeError(f"{ENFORCED} you tried to allocate 64 bytes."), 70, "(tried to allocate 64 bytes)"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "no space left"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_in_the_middle_is_one_sentence_and_keeps_what_was_done(
    error, code, sentence, tmp_path, monkeypatch, capsys
):
    failing(monkeypatch, error)
    assert main([*TINY, "--out", str(tmp_path / "run")]) == code
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("secateur: ")]
    assert len(said) == 1 and sentence in said[0] and "finished stages are saved" in said[0]
    assert {row.pruner for row in load_rows(tmp_path / "run") if row.attack == "conf"} == {"none"}
    log = tmp_path / "run" / "fault.log"
    assert log.exists() == (code == 70) and (code != 70 or (str(log) in said[0] and "in fails" in log.read_text()))


def test_a_fault_before_there_is_a_folder_leaves_its_log_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(audit, "check_audit", lambda config: 1 / 0)
    assert main([*TINY, "--out", str(tmp_path / "run")]) == 70
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "Traceback" not in said
    log = Path(said.rpartition("the log is ")[2].strip())
    assert "ZeroDivisionError" in log.read_text() and not (tmp_path / "run").exists()
    log.unlink()


def secateur(*arguments, **options):
    command = [sys.executable, "-m", "secateur", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.system
def test_a_closed_pipe_does_not_hide_a_passed_limit(tmp_path):
    process = secateur(*TINY, "--out", str(tmp_path / "run"), "--set", "limits.auc=0.0", "--json")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 1, said
    assert "the reader of the output is gone" in said and "is above the limit 0" in said
    assert "Traceback" not in said and "Exception ignored" not in said


@pytest.mark.system
def test_a_terminated_run_is_like_an_interrupted_one(tmp_path):
    out = tmp_path / "run"
    process = secateur(
        *TINY, "--set", "train.epochs=2000", "--out", str(out), env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    until = time.monotonic() + 60
    while not (out / "config.yaml").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "secateur: interrupted; finished stages are saved" in said and "Traceback" not in said


def test_an_interruption_during_the_imports_is_one_sentence(monkeypatch, capsys):
    import builtins

    from secateur.__main__ import main as command

    real = builtins.__import__

    def interrupted(name, *rest):
        if name == "secateur.cli":
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as caught:
        command()
    monkeypatch.undo()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "secateur: interrupted; nothing was begun\n"
