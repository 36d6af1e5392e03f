import pytest
import torch
from torch import nn

import secateur
from secateur.interfaces import BlackBox
from secateur.training.recipe import Recipe


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
    attacks = {row.attack for row in report.rows}
    assert attacks >= {None, "conf", "xent", "entropy", "mentr", "top1-conf", "correctness", "blindmi"}
    assert not attacks & {"lira", "rmia", "samia", "nn"}
    assert report.value("auc", "conf") > 0.8 and report.value("balanced_accuracy", "conf") is None


def test_with_shadows_all_attacks_that_can_run_do(models, few_epochs):
    from secateur.catalogue import methods

    report = secateur.audit(*models[0], shadows=models[1:])
    assert {row.attack for row in report.rows} == {None, *methods("attack")}
    assert report.value("balanced_accuracy", "conf") > 0.7


def checks(report):
    return {row.extra["check"]: row.value for row in report.rows if row.metric == "valid"}


def test_the_examples_and_models_are_checked_as_by_the_command(models):
    report = secateur.audit(*models[0], shadows=models[1:], attacks=["conf"])
    assert checks(report) == dict.fromkeys(("duplicates", "blind", "labels", "members", "shadows"), 1.0)
    assert (report.value("members"), report.value("nonmembers")) == (80, 80)
    net, inside, outside = models[0]
    shifted = secateur.audit(net, inside, (outside[0] + 1, outside[1]), attacks=["conf"])
    assert checks(shifted)["blind"] == 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = nn.Sequential(nn.Linear(30, 2))
    assert checks(secateur.audit(untrained, inside, outside, attacks=["conf"]))["members"] == 0
    apart = secateur.audit(*models[0], shadows=[(untrained, *models[1][1:])], attacks=["conf"])
    assert checks(apart)["shadows"] == 0


def test_the_report_has_the_scores_of_every_example(models):
    net, inside, outside = models[0]
    report = secateur.audit(net, inside, outside, attacks=["conf"], name="mine")
    assert report.records.model == "mine" and report.records.ids.tolist() == list(range(160))
    assert report.records.is_member.sum() == 80 and torch.equal(report.records.labels[80:], outside[1])
    own = net(torch.cat([inside[0], outside[0]])).softmax(1)[torch.arange(160), report.records.labels]
    assert torch.equal(report.records.scores["conf"].argsort()[:5], own.argsort()[:5])
    fast = {"pruner": "l1-unstructured", "recipe": Recipe(epochs=1)}
    pruned = secateur.audit(net, inside, outside, attacks=["conf"], **fast).records
    assert pruned.ids.tolist() == [*range(80), *range(88, 160)]  # eight non-members stopped the fine-tuning
    assert torch.equal(pruned.labels[80:], outside[1][8:])


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


def test_pruning_takes_one_nonmember_and_the_audit_another(models):
    net, inside, outside = models[0]
    with pytest.raises(secateur.WrongInput, match="use at least two"):
        secateur.audit(net, inside, (outside[0][:1], outside[1][:1]), pruner="random")


def test_a_box_that_answers_with_labels_only(models):
    net, inside, outside = models[0]
    box = BlackBox(lambda x: nn.functional.one_hot(net(x).argmax(1), 2).float(), labels_only=True)
    report = secateur.audit(box, inside, outside)
    assert report.value("auc", "correctness") > 0.6 and checks(report) == {}
    with pytest.raises(secateur.WrongInput, match="labels only"):
        secateur.audit(box, inside, outside, shadows=models[1:], attacks=["conf"])


def test_members_that_are_also_nonmembers_are_refused(models):
    net, inside, outside = models[0]
    mixed = (torch.cat([outside[0], inside[0][:2]]), torch.cat([outside[1], inside[1][:2]]))
    with pytest.raises(secateur.WrongInput, match="2 examples are members too"):
        secateur.audit(net, inside, mixed)


def changed(data, inputs=lambda x: x, labels=lambda y: y):
    return inputs(data[0]), labels(data[1])


@pytest.mark.parametrize(
    ("field", "change", "sentence"),
    [
        ("members", {"labels": lambda y: y[:-1]}, "80 inputs and labels of the shape"),
        ("nonmembers", {"labels": lambda y: y[:, None]}, "80 inputs and labels of the shape"),
        ("members", {"labels": lambda y: y + 1}, "labels from 1 to 2; allowed by the model's outputs: 0 to 1"),
        ("nonmembers", {"labels": lambda y: y - 1}, "labels from -1 to 0"),
        ("members", {"labels": lambda y: y.float()}, "use whole numbers"),
        ("members", {"inputs": lambda x: x[:0], "labels": lambda y: y[:0]}, "at least one input"),
        ("model", {"inputs": lambda x: x[:, :7]}, r"inputs of the shape \(7,\); it raised RuntimeError"),
    ],
)
def test_examples_that_do_not_fit_are_one_sentence(models, field, change, sentence):
    net, inside, outside = models[0]
    sides = (inside, changed(outside, **change)) if field == "nonmembers" else (changed(inside, **change), outside)
    with pytest.raises(secateur.WrongInput, match=f"^{field}: .*{sentence}"):
        secateur.audit(net, *sides)
    if field != "model":
        with pytest.raises(secateur.WrongInput, match=f"^shadows: .*{sentence}"):
            secateur.audit(*models[1], shadows=[(net, *sides)])


def test_shadows_keep_their_sides_and_the_victim_apart(models):
    net, inside, outside = models[1]
    with pytest.raises(secateur.WrongInput, match=r"^shadows: 80 examples are members too"):
        secateur.audit(*models[0], shadows=[(net, inside, inside)])
    with pytest.raises(secateur.WrongInput, match=r"^shadows: 80 examples are the model's"):
        secateur.audit(*models[0], shadows=[(net, models[0][1], outside)])


def test_a_model_in_double_precision_is_audited_with_single_precision_data(models):
    import copy

    doubles = [(copy.deepcopy(net).double(), *sides) for net, *sides in models]
    single, double = (
        secateur.audit(*these[0], shadows=these[1:], attacks=["conf"]).value("auc", "conf")
        for these in (models, doubles)
    )
    assert double == pytest.approx(single, abs=1e-3)
    pruned = {"pruner": "l1-unstructured", "recipe": Recipe(epochs=1)}
    assert secateur.audit(*doubles[0], attacks=["correctness"], **pruned).value("auc", "correctness") > 0.5
