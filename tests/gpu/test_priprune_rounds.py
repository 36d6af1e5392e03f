"""Whole rounds with turns by PriPrune's kernels: by Triton's interpreter, or on a GPU where there is one."""

import os

import pytest
import torch

from tiny_rules import federation, plain_net, run

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur.config import base_pruning
from secateur.defenses import priprune
from secateur.gpu import graphs, priprune_ops  # noqa: F401  the operators

pytestmark = pytest.mark.system  # interpreted, they take minutes
GPU = torch.cuda.is_available()


def model_of(base, learns, device="cpu", rounds=4):
    rule = priprune.PriPrune(learns=learns, step=0.5, sharing=0.25)
    terms = {"base": base_pruning(base).make(), "averaging": "coverage", "custom_turn": rule, "rounds": rounds}
    fed = federation(plain_net().float() if GPU else None, execution="stacked", device=device, **terms)
    rows = run(fed)
    told = {row.metric: row.value for row in rows if row.round == rounds and row.client is None}
    assert 0 < told["withheld_of_all"] < 1
    return fed.model()


@pytest.mark.skipif(GPU, reason="left out: kernels are compiled here, not interpreted")
@pytest.mark.parametrize("learns", ["turn", "step"])
@pytest.mark.parametrize("base", ["none", "prunefl:every=2:iterations=2", "feddst:every=2"])
def test_rounds_are_the_plain_ones(base, learns, monkeypatch):
    expected = model_of(base, learns)
    monkeypatch.setattr(priprune, "passes_for", lambda *_: priprune.Fused(torch.ops.secateur))
    for name, value in model_of(base, learns).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)


@pytest.mark.skipif(not GPU, reason="left out: there is no GPU")
@pytest.mark.parametrize("base", ["none", "prunefl:every=2:iterations=2", "feddst:every=2"])
def test_on_a_gpu_they_are_so_captured_and_eager(base, monkeypatch):
    captured = model_of(base, "turn", "cuda", 9)
    monkeypatch.setattr(graphs, "WARMUPS", 10**9)
    eager = model_of(base, "turn", "cuda", 9)
    for name, value in eager.items():
        torch.testing.assert_close(captured[name], value, rtol=0, atol=1e-5)
    first = model_of(base, "turn", "cuda", 1)  # later small differences decide what is withheld
    monkeypatch.setattr(priprune, "FUSED", False)
    for name, value in model_of(base, "turn", "cuda", 1).items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-4)
