"""Every base pruning under every rule of the catalogue: equal stacked and one by one, and nothing withheld leaves."""

import pytest
import torch

from secateur.catalogue import methods
from secateur.config import base_pruning, defense
from secateur.defenses.uploads import protection_of
from secateur.gpu import graphs
from tiny_rules import federation, plain_net, run

TOLD = {"prunefl": "prunefl:every=2:iterations=2", "feddst": "feddst:every=2", "random": "random:every=2"}
BASES = sorted(methods("base-pruning"))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
DEFENSES = [name for name, each in methods("defense").items() if each.info["acts_on"] == "client"]


def rows_of(base, rule, execution, device="cpu", **more):
    seen = []
    terms = {"base": base_pruning(TOLD.get(base, base)).make()}
    terms |= {"averaging": "coverage"} | protection_of(defense(rule)) | more
    fed = federation(execution=execution, observers=[(1, seen.append)], device=device, **terms)
    return run(fed), fed, seen


@pytest.mark.parametrize("rule", DEFENSES)
@pytest.mark.parametrize("base", BASES)
def test_rounds(base, rule):
    (rows, one, seen), (others, many, _) = rows_of(base, rule, "sequential"), rows_of(base, rule, "stacked")
    assert [(row.metric, row.round) for row in rows] == [(row.metric, row.round) for row in others]
    for name, value in one.model().items():
        torch.testing.assert_close(many.model()[name], value, rtol=0, atol=1e-9)
    told = {row.metric: row.value for row in rows if row.round == 4 and row.client is None}
    assert told["density"] == pytest.approx(1 if base == "none" else 0.7, abs=0.02)
    assert 0 <= told["withheld_of_all"] <= 1 and (rule == "priprune" or told["withheld_of_all"] > 0.1)
    total = sum(value.numel() for value in one.server.weights.values() if value.ndim > 1)
    if rule != "priprune":  # exactly its share is exactly 0 of what the server sees, beside what the base drops
        share, dropped = int(0.3 * total), total - round(told["density"] * total)
        assert told["withheld_of_all"] == pytest.approx(share / total)
        for each in seen:
            zeros = sum(int((value == 0).sum()) for value in each.view.update.values.values() if value.ndim > 1)
            assert zeros == share + dropped or (base == "feddst" and zeros > share + dropped)  # grown, and still 0
    last = {each.client: each.view.update.values for each in seen}
    for client, state in one.states.items():
        for name in (name for name in state if name.startswith("withheld.")):
            assert (last[client][name.removeprefix("withheld.")][state[name]] == 0).all()


@needs_cuda
@pytest.mark.parametrize("rule", DEFENSES)
@pytest.mark.parametrize("base", BASES)
def test_captured_equals_eager_on_a_gpu(base, rule, monkeypatch):
    made = []
    for warmups in (3, 10**9):
        monkeypatch.setattr(graphs, "WARMUPS", warmups)
        made.append(rows_of(base, rule, "auto", "cuda", rounds=9))
    (rows, one, _), (others, other, _) = made
    for name, value in one.model().items():
        torch.testing.assert_close(other.model()[name], value, rtol=0, atol=1e-9)
    assert [(row.metric, row.round) for row in rows] == [(row.metric, row.round) for row in others]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("rule", ["pseudo-largest", "mix", "random", "largest:of=kept"])
@pytest.mark.parametrize("base", ["none", "prunefl", "feddst"])
def test_exactly_its_share_in_float32(base, rule, device):
    """In which a GPU has kernels of its own for what is largest."""
    _, fed, seen = rows_of(base, rule, "stacked", device, rounds=9, net=plain_net().float())
    total = sum(keep.numel() for keep in fed.server.mask.values())
    kept = round(fed.server.density * total)
    wanted = kept - int(0.3 * (kept if "kept" in rule else total))
    assert len(seen) == 27
    for each in seen:
        sent = sum(int(value.count_nonzero()) for value in each.view.update.values.values() if value.ndim > 1)
        assert sent == wanted or (base == "feddst" and wanted - 3 <= sent < wanted)  # grown, and still 0


@needs_cuda
@pytest.mark.parametrize("rule", ["largest", "pseudo-largest"])
@pytest.mark.parametrize("base", ["none", "prunefl", "feddst"])
def test_a_gpu_equals_a_cpu(base, rule):
    (rows, one, _), (others, other, _) = (rows_of(base, rule, "auto", device, rounds=9) for device in ("cpu", "cuda"))
    for name, value in one.model().items():
        torch.testing.assert_close(other.model()[name].cpu(), value, rtol=0, atol=1e-9)
    assert [(row.metric, row.round) for row in rows] == [(row.metric, row.round) for row in others]
