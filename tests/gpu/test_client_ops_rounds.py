"""Rounds whose passes over the memory are kernels, which Triton's interpreter runs, against operations of torch."""

import importlib.util
import os

import pytest
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from secateur.config import defense
from secateur.defenses import withholding
from secateur.defenses.uploads import protection_of
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.gpu import client_ops
from tiny_rules import Half, Moving, Stale, federation, run

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytestmark = [
    pytest.mark.system,  # interpreted, they take minutes
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or torch.cuda.is_available(), reason="left out: nothing to interpret"
    ),
]
CASES = {
    "plain": {},
    "pseudo-largest": protection_of(defense("pseudo-largest")),
    "mix": protection_of(defense("mix")) | {"base": Half(), "averaging": "coverage"},
    "pseudo-mix": protection_of(defense("pseudo-mix")) | {"base": Moving()},
    "pseudo-largest, pruned": protection_of(defense("pseudo-largest"))
    | {"base": Half(), "averaging": "coverage", "broadcast": "dense"},
    "pruned, momentum": {"base": Half(), "local": LocalTraining(3, None, 4, 0.1, 0.9, 0.01)},
    "squares": protection_of(defense("pseudo-random")) | {"base": Stale()},
    "priprune": protection_of(defense("priprune:sharing=0.02")) | {"base": Half()},
}


@pytest.mark.parametrize("case", CASES)
def test_rounds(case, monkeypatch):
    from secateur.gpu import client_ops_kernels

    called = []

    def kernels_for(*given):
        called.append(given)
        return None if any(map(is_functorch_wrapped_tensor, given)) else client_ops_kernels

    terms = CASES[case] | {"faults": Faults(nan=0.2, drop_out=0.1)}
    one = federation(execution="stacked", **terms)
    rows = run(one)
    monkeypatch.setattr(client_ops, "_kernels_for", kernels_for)
    operators = torch.ops.secateur  # as tensors on a GPU go by them
    monkeypatch.setattr(withholding, "magnitudes", lambda values, keeps: operators.magnitudes([*values], [*keeps]))
    monkeypatch.setattr(
        withholding, "intersect", lambda where, keep, inverted=False: operators.both(where, keep, inverted)
    )
    many = federation(execution="stacked", **terms)
    assert [(row.metric, row.value) for row in run(many)] == [(row.metric, pytest.approx(row.value)) for row in rows]
    assert called and one.states.keys() == many.states.keys()
    for name, value in one.model().items():
        torch.testing.assert_close(many.model()[name], value, rtol=0, atol=1e-9)
    for client, state in one.states.items():
        for name, value in state.items():
            torch.testing.assert_close(many.states[client][name], value, rtol=0, atol=1e-9)
