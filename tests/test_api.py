import pytest
import torch
from torch import nn

import secateur
from secateur.interfaces import BlackBox
from secateur.recipe import Recipe


def memorised(seed, rows=80, width=30):
    """A small network that has learnt the random labels of its members by heart."""
    rng = torch.Generator().manual_seed(seed)
    inside, outside = (
        (torch.randn(rows, width, generator=rng), torch.randint(2, (rows,), generator=rng)) for _ in range(2)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2))
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(120):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inside[0]), inside[1]).backward()
        optimiser.step()
    return net, inside, outside


@pytest.fixture(scope="module")
def models():
    return [memorised(seed) for seed in range(3)]


def test_any_module_and_tensors_with_shadows_of_ones_own(models, tmp_path):
    report = secateur.audit(*models[0], shadows=models[1:], attacks=["conf", "correctness"])
    assert report.value("auc", "conf") > 0.8
    assert report.value("train_accuracy") > 0.95 > 0.7 > report.value("test_accuracy")
    page = report.write(tmp_path / "page.html").read_text()
    assert "conf" in page and "<html" in page


def test_without_shadows_the_attacks_that_need_none_run(models):
    report = secateur.audit(*models[0])
    assert {row.attack for row in report.rows} >= {None, "correctness", "blindmi"}
    assert "conf" not in {row.attack for row in report.rows}


def test_a_model_can_be_pruned_first(models):
    before = {name: value.clone() for name, value in models[0][0].state_dict().items()}
    report = secateur.audit(
        *models[0],
        shadows=models[1:],
        attacks=["conf"],
        pruner="l1-unstructured",
        sparsity=0.5,
        recipe=Recipe(epochs=3),
    )
    assert {row.pruner for row in report.rows} == {"l1-unstructured"}
    assert all(torch.equal(before[name], value) for name, value in models[0][0].state_dict().items())


def test_a_box_that_answers_with_labels_only(models):
    net, inside, outside = models[0]
    box = BlackBox(lambda x: nn.functional.one_hot(net(x).argmax(1), 2).float(), labels_only=True)
    report = secateur.audit(box, inside, outside)
    assert report.value("auc", "correctness") > 0.6
    with pytest.raises(secateur.WrongInput, match="labels only"):
        secateur.audit(box, inside, outside, shadows=models[1:], attacks=["conf"])


def test_members_that_are_also_nonmembers_are_refused(models):
    net, inside, outside = models[0]
    mixed = (torch.cat([outside[0], inside[0][:2]]), torch.cat([outside[1], inside[1][:2]]))
    with pytest.raises(secateur.WrongInput, match="2 examples are members too"):
        secateur.audit(net, inside, mixed)
