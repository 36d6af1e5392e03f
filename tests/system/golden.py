"""Golden files: what commands answer, recorded once, so that a rebuilt house gives the same rows and sentences.

`python tests/system/golden.py [NAME ...]` records them anew (all, or those named); test_golden.py compares.

Every case runs in one process with one thread and the instruction set that all x86-64 machines since 2013 have, so
that rows are equal bit for bit between machines. `PROBE` is a short calculation in the same setting: where it differs
from the recorded one, the machine counts otherwise and the numbers of rows cannot be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
PROBE = "probe"
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "100",
    "SECATEUR_DATA": "",
}

FEDERATE = "federate --data digits --model digits-cnn --clients 8 --per-round 4 --rounds 6 --batch-size 8"
ATTACK = "--local-steps 1 --attack sgi --iterations 10"
SHORT = "--set rounds=1 --set examples=500"
RUNS = {
    "audit": "audit --set examples=900",
    "audit-defended": "audit --set train.epochs=2 --set finetune.epochs=1 --shadows 2 --adaptive "
    "--pruner l1-structured,slimming --defense ppb --attack conf,samia,lira,rmia --set examples=600",
    "invert": "invert --attack ig,dlg --targets 2 --iterations 20 --restarts 2 --defense none,dgp",
    "invert-adaptive": "invert --attack ig:adaptive=support,rob --targets 1 --iterations 10 --labels oracle "
    "--defense dgp+error-feedback,soteria",
    "invert-generator": "invert --attack ggl --targets 1 --iterations 5 --set generator_steps=10",
    "federate": f"{FEDERATE} --base-pruning snip --defense none,pseudo-largest {ATTACK}",
    "federate-prunefl": f"{FEDERATE} --model lenet-zhu --base-pruning prunefl {ATTACK} "
    "--defense none,priprune:sharing=2e-4,dgp+error-feedback",
    "federate-faults": f"{FEDERATE} --base-pruning feddst --seeds 2 --set faults.drop_out=.3 --set faults.nan=.2 "
    "--set faults.shape=.2 --partition dirichlet-labels --local-epochs 1",
    "federate-membership": f"{FEDERATE} --membership yeom,lira --attack-every 3 --attack-history 2",
    "federate-submodels": "federate --data digits --submodels mapp-fl,heterofl,local --large-clients 2 "
    "--clients 3 --rounds 2 --attack yeom,rmia",
    "study-samia": "reproduce samia-fig10 --scale tiny",
    "study-dgp": "reproduce dgp-table2 --scale tiny",
    "study-priprune": "reproduce priprune-fig8 --scale tiny",
    "study-mapp": f"reproduce mapp-table6 --scale tiny {SHORT}",
}
COMMANDS = ("audit", "invert", "federate", "audit-app", "gate", "prune", "reproduce", "sweep", "list", "report")
KINDS = ("attacks", "defenses", "pruners", "base-prunings", "submodels", "models", "datasets", "studies")
ERRORS = (
    "audit --sparsity 1.5",
    "audit --sparsity half",
    "audit --pruner l1",
    "audit --model resnet19",
    "audit --model nowhere:net",
    "audit --data digit",
    "audit --data nowhere.npz",
    "audit --device cuda:99",
    "audit nowhere.yaml",
    "audit a.yaml --config b.yaml",
    "audit --attack ig",
    "audit --defense dgp",
    "audit --defense ppb:strong=1",
    "audit --protocol guessed",
    "audit --seeds 0",
    "audit --shadows many",
    "audit --set train.epoch=3",
    "audit --set limits.auc=2",
    "audit --weights nowhere.safetensors",
    "audit --predictions nowhere.npz",
    "audit --in-out 3",
    "invert --attack conf",
    "invert --attack ig:iterations=0",
    "invert --attack ig:distance=far",
    "invert --adaptive all",
    "invert --labels guessed",
    "invert --batch-size 0",
    "invert --local-steps 2 --defense soteria",
    "invert --defense dgp:k1=2",
    "invert --defense dgp:k1=.9:k2=.9",
    "invert --defense ppb",
    "invert --update nowhere.safetensors",
    "invert --model mlp --data breast_cancer",
    "federate --clients 0",
    "federate --per-round 200 --clients 100",
    "federate --base-pruning l1",
    "federate --base-pruning prunefl --defense ats",
    "federate --defense priprune:privacy=-1",
    "federate --defense pseudo-largest:rate=2",
    "federate --partition alphabet",
    "federate --partition writer",
    "federate --averaging median",
    "federate --engine beam",
    "federate --attack-at 500",
    "federate --attack sgi --attack-every 0",
    "federate --membership samia",
    "federate --view sum --attack rob",
    "federate --submodels mapp",
    "federate --submodels mapp-fl --base-pruning snip",
    "federate --submodels mapp-fl --attack sgi",
    "federate --attack conf",
    "federate --membership sgi",
    "federate --submodels mapp-fl --client-widths 2",
    "federate --set faults.nan=2",
    "federate --local-epochs 1 --local-steps 2",
    "audit-app",
    "audit-app nowhere",
    "audit-app nowhere --attack-clients 20",
    "prune --out model.pt",
    "prune --sparsity 1",
    "prune --weights nowhere.safetensors",
    "reproduce dgp-table99",
    "reproduce dgp-table1 --scale huge",
    "reproduce dgp-table1 --scale tiny --set nothing=1",
    "sweep",
    "sweep nowhere.yaml",
    "list",
    "list attack",
    "report nowhere",
)
PLANS = ("audit --seeds 2", "invert --defense none,dgp", "federate --attack sgi", "federate --submodels mapp-fl")


def run(line: str) -> tuple[int, str, str]:
    """Run a command line in this process: its exit code, standard output and standard error."""
    from secateur.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    return code, out.getvalue(), err.getvalue()


def rows(line: str) -> Iterator[Any]:
    """The rows that a command prints as JSON, without times and without the number of their schema."""
    code, out, err = run(f"{line} --out run --json")
    assert code == 0, err
    for row in json.loads(out):
        if not row.get("timing"):
            yield {name: value for name, value in row.items() if name != "schema"}


def collaboration() -> Iterator[Any]:
    """The history of a collaborative training under DGP with error feedback, and a sum of its model."""
    from torch import Generator

    from secateur.data.load import load
    from secateur.defenses.dgp import DualGradientPruning
    from secateur.defenses.error_feedback import ErrorFeedback
    from secateur.federated.collaborative.training import train_collaboratively
    from secateur.models.create import create

    rng = Generator().manual_seed(0)
    digits = load("digits").limit_rows(400, rng)
    net = create("digits-cnn", digits.input_shape, digits.classes, rng)
    trained = train_collaboratively(net, digits, 3, ErrorFeedback(DualGradientPruning()), [0.1, 0.05], rng)
    for row in trained.history:
        yield {name: value for name, value in row.items() if name != "seconds"}
    yield {name: float(value.double().sum()) for name, value in trained.state.items()}


def sentences() -> Iterator[Any]:
    """What wrong command lines are answered with."""
    for line in ERRORS:
        code, out, err = run(line)
        yield {"command": line, "exit": code, "out": out, "err": err}


def texts() -> Iterator[Any]:
    """What commands print of themselves: help, lists and plans."""
    for line in ("--help", *(f"{command} --help" for command in COMMANDS)):
        yield {"command": line, "out": run(line)[1].splitlines()}
    for kind in KINDS:
        yield {"command": f"list {kind} --json", "out": json.loads(run(f"list {kind} --json")[1])}
    for line in PLANS:
        yield {"command": f"{line} --dry-run", "out": run(f"{line} --dry-run")[1].splitlines()}


def probe() -> Iterator[Any]:
    """A calculation that is equal bit for bit where rows can be: a few steps of a small convolution, and its losses."""
    import torch
    from torch import Generator, nn

    rng = Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=rng)
    inputs, labels = torch.randn(16, 3, 8, 8, generator=rng), torch.randint(10, (16,), generator=rng)
    for _ in range(20):
        loss = nn.functional.cross_entropy(net(inputs), labels)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
        yield float(loss)


CASES: dict[str, Callable[[], Iterator[Any]]] = {
    PROBE: probe,
    **{name: (lambda line=line: rows(line)) for name, line in RUNS.items()},
    "collaboration": collaboration,
    "errors": sentences,
    "texts": texts,
}


def answer(name: str) -> list[str]:
    """What a case gives now, a line of JSON for each of its records, from a process in the setting above."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--answer", name]
        done = subprocess.run(command, cwd=folder, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def recorded(name: str) -> list[str]:
    """What a case gave when it was recorded."""
    return (FOLDER / f"{name}.jsonl").read_text().splitlines()


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--answer"]:
        for record in CASES[arguments[1]]():
            print(json.dumps(record, sort_keys=True))
        return
    for name in arguments or CASES:
        lines = answer(name)
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        print(f"{name}: {len(lines)} records", flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
