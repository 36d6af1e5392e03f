"""Models in the forms that people deploy: the confidence AUC of each is scikit-learn's on the same rows."""

import copy
import types
import warnings

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.utils import prune

import secateur
from secateur.interfaces import BlackBox

ROWS, WIDTH = 60, 20


def examples(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(ROWS, WIDTH, generator=rng), torch.randint(2, (ROWS,), generator=rng)) for _ in range(2)]


def train(net, inputs, labels, loss=nn.functional.cross_entropy):
    """Learn the random labels of the members by heart."""
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        loss(net(inputs), labels).backward()
        optimiser.step()
    return net.eval()


@pytest.fixture(scope="session")
def sides():
    return examples()


@pytest.fixture(scope="session")
def net(sides):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)
        return train(nn.Sequential(*layers), *sides[0])


@pytest.fixture(scope="session")
def single(sides):
    """A network with one logit for two classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        inputs, labels = sides[0]
        loss = nn.functional.binary_cross_entropy_with_logits
        return train(net, inputs, labels[:, None].float(), loss)


class Answering(nn.Module):
    """A network whose answer is changed at the end."""

    def __init__(self, net, change):
        super().__init__()
        self.net, self.change = net, change

    def forward(self, x):
        return self.change(self.net(x))


def masked(net):
    twin = copy.deepcopy(net)
    prune.l1_unstructured(twin[0], "weight", 0.5)
    prune.ln_structured(twin[3], "weight", 0.25, n=2, dim=1)
    return twin


def normed(net, normalise):
    twin = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normalise(twin[0])
    return twin


def quantised(net):
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(copy.deepcopy(net), {nn.Linear}, dtype=torch.qint8)


def scripted(make, *rest):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*rest)


def exported(net):
    rows = torch.export.Dim("rows", min=1, max=100_000)
    return torch.export.export(net, (torch.zeros(2, WIDTH),), dynamic_shapes=({0: rows},))


def quantised_by_torchao(net):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    net = copy.deepcopy(net)
    quantize_(net, Int8DynamicActivationInt8WeightConfig())
    return net


MODULES = {
    "logits": lambda net: net,
    "probabilities": lambda net: Answering(net, lambda y: y.softmax(1)),
    "log-probabilities": lambda net: Answering(net, lambda y: y.log_softmax(1)),
    "an object with logits": lambda net: Answering(net, lambda y: types.SimpleNamespace(loss=None, logits=y)),
    "a mapping with logits": lambda net: Answering(net, lambda y: {"logits": y, "hidden": y[:, :1]}),
    "a tuple": lambda net: Answering(net, lambda y: (y, y[:, :1])),
    "masks of torch.nn.utils.prune": masked,
    "weight_norm of old": lambda net: normed(net, nn.utils.weight_norm),
    "weight_norm of today": lambda net: normed(net, nn.utils.parametrizations.weight_norm),
    "int8, dynamic": quantised,
    "int8 by torchao": quantised_by_torchao,
    "torch.compile": lambda net: torch.compile(net, backend="eager"),
    "scripted": lambda net: scripted(torch.jit.script, net),
    "traced": lambda net: scripted(torch.jit.trace, net, torch.zeros(2, WIDTH)),
    "torch.fx": torch.fx.symbolic_trace,
    "torch.export": exported,
    "float64": lambda net: copy.deepcopy(net).double(),
    "bfloat16": lambda net: copy.deepcopy(net).bfloat16(),
    "a function": lambda net: lambda x: net(x).detach(),
    "a function to numpy": lambda net: lambda x: net(x).softmax(1).detach().numpy(),
    "a black box": lambda net: BlackBox(lambda x: net(x).softmax(1).detach()),
}
ESTIMATORS = {
    "forest": lambda: RandomForestClassifier(10, random_state=0),
    "pipeline": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
    "ridge, a decision function": RidgeClassifier,
}


def own_auc(answers, sides):
    """scikit-learn's AUC of the probability of the true label."""
    labels = torch.cat([labels for _, labels in sides])
    confidence = answers.double()[torch.arange(len(labels)), labels]
    return roc_auc_score(np.repeat([1, 0], [len(side[1]) for side in sides]), confidence.numpy())


def audited(model, sides):
    return secateur.audit(model, *sides, attacks="conf").value("auc", "conf")


READ = {
    "an object with logits": lambda y: y.logits,
    "a mapping with logits": lambda y: y["logits"],
    "a tuple": lambda y: y[0],
}
PRECISION = {"float64": torch.float64, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("form", MODULES)
def test_every_form_of_a_network_has_its_own_auc(form, net, sides):
    model = MODULES[form](net)
    inputs = torch.cat([inputs for inputs, _ in sides]).to(PRECISION.get(form, torch.float32))
    ask = {"torch.export": lambda x: model.module()(x), "a black box": lambda x: model.predict(x)}.get(form, model)
    answers = torch.as_tensor(READ.get(form, lambda y: y)(ask(inputs))).detach().float()
    if form not in ("probabilities", "a function to numpy", "a black box"):
        answers = answers.softmax(1)
    auc = audited(model, sides)
    assert auc == pytest.approx(own_auc(answers, sides), abs=1e-3) and auc > 0.8


@pytest.mark.parametrize("shape", ["column", "vector", "probability"])
def test_one_number_for_two_classes_is_for_the_second(shape, single, sides):
    change = {"column": lambda y: y, "vector": lambda y: y[:, 0], "probability": torch.sigmoid}[shape]
    p = single(torch.cat([inputs for inputs, _ in sides])).sigmoid().detach()
    own = own_auc(torch.cat([1 - p, p], 1), sides)
    assert audited(Answering(single, change), sides) == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_estimator_of_scikit_learn(kind, sides):
    (x, y), _ = sides
    model = ESTIMATORS[kind]().fit(x.numpy(), y.numpy())
    inputs = torch.cat([inputs for inputs, _ in sides]).numpy()
    if hasattr(model, "predict_proba"):
        answers = torch.from_numpy(model.predict_proba(inputs))
    else:
        p = torch.from_numpy(model.decision_function(inputs)).sigmoid()
        answers = torch.stack([1 - p, p], 1)
    assert audited(model, sides) == pytest.approx(own_auc(answers, sides), abs=1e-3)


def test_an_estimator_that_saw_no_example_of_a_class_has_no_probability_for_it(sides):
    (x, y), _ = sides
    model = LogisticRegression().fit(x.numpy(), 2 * y.numpy())  # the classes 0 and 2
    answers = secateur.wrap(model).predict(x)
    assert answers.shape == (ROWS, 3) and not answers[:, 1].any()
    with pytest.raises(secateur.WrongInput, match="whole numbers"):
        secateur.wrap(LogisticRegression().fit(x.numpy(), np.where(y.numpy(), "cat", "dog")))


def test_an_estimator_with_labels_only(sides):
    from sklearn.neighbors import NearestCentroid

    class Labels:
        classes_ = np.arange(2)

        def predict(self, x):
            return NearestCentroid().fit(*(part.numpy() for part in sides[0])).predict(x)

    report = secateur.audit(Labels(), *sides)
    assert {row.attack for row in report.rows} == {None, "correctness"}


def test_tokens_stay_whole_numbers():
    rng = torch.Generator().manual_seed(0)
    sides = [(torch.randint(50, (ROWS, 7), generator=rng), torch.randint(2, (ROWS,), generator=rng)) for _ in range(2)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = train(nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(112, 2)), *sides[0])
    answers = net(torch.cat([inputs for inputs, _ in sides])).softmax(1).detach()
    report = secateur.audit(net, *sides)
    assert report.value("auc", "conf") == pytest.approx(own_auc(answers, sides), abs=1e-3)
    assert {"blindmi", "correctness"} <= {row.attack for row in report.rows}
    assert not [row for row in report.rows if row.metric.startswith("sensitivity")]


# Recognised pruning --------------------------------------------------------------------------------------------------
def test_masks_are_folded_and_their_sparsity_is_known_by_layer(net, sides):
    model = masked(net)
    report = secateur.audit(model, *sides, attacks="conf")
    shares = {row.extra["layer"]: row.value for row in report.rows if row.metric == "layer_sparsity"}
    assert shares == {"0": pytest.approx(0.5), "3": pytest.approx(0.25)}
    assert {row.sparsity for row in report.rows} == {round(336 / 704, 4)}
    assert prune.is_pruned(model)  # the user's model is as it was
    assert not [row for row in secateur.audit(net, *sides, attacks="conf").rows if row.metric == "layer_sparsity"]


def test_before_and_after_are_compared_over_the_same_rows(net, sides, tmp_path, capsys):
    report = secateur.audit(masked(net), *sides, before=net, attacks=["conf", "correctness"])
    aucs = {
        name: next(r.value for r in report.rows if r.metric == "auc" and r.attack == "conf" and r.pruner == name)
        for name in ("none", "given")
    }
    (change,) = [row for row in report.rows if row.metric == "auc_change" and row.attack == "conf"]
    assert change.value == pytest.approx(aucs["given"] - aucs["none"]) and change.low <= change.value <= change.high
    (drop,) = [row for row in report.rows if row.metric == "accuracy_drop"]
    tests = [row.value for row in report.rows if row.metric == "test_accuracy"]
    assert drop.value == pytest.approx(tests[1] - tests[0]) and drop.pruner == "given"
    assert "original" in report.write(tmp_path / "page.html").read_text()
    report.print()
    said = capsys.readouterr().out.splitlines()
    lines = [line for line in said if " conf " in line and line.startswith("pruned as given")]
    assert len(lines) == 1 and f"{100 * tests[0]:.1f}%" in lines[0]  # rows of layers hide no accuracy
    with pytest.raises(secateur.WrongInput, match="leave out the pruner"):
        secateur.audit(net, *sides, before=net, pruner="l1-unstructured")
    with pytest.raises(secateur.WrongInput, match=r"^before: it answers with 3 classes, and the model with 2"):
        secateur.audit(net, *sides, before=nn.Linear(WIDTH, 3))


def test_removed_channels_count_as_sparsity_beside_the_model_before(net, sides):
    small = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
    report = secateur.audit(small, *sides, before=net, attacks="conf")
    shares = {row.extra["layer"]: row.value for row in report.rows if row.metric == "layer_sparsity"}
    assert shares == {"0": 0.75, "3": 0.75}


# Refusals ------------------------------------------------------------------------------------------------------------
def with_nan(net):
    return Answering(net, lambda y: y * torch.nan)


REFUSED = {
    "NaN": (with_nan, "model: returned NaN or infinite"),
    "dropout left on": (
        lambda net: Answering(net, lambda y: nn.functional.dropout(y, 0.5)),
        "model: it answers the same input differently when asked again",
    ),
    "two rows for an example": (lambda net: Answering(net, lambda y: torch.cat([y, y], 0)), "model: answers"),
    "text": (lambda net: lambda x: "cat", "model: it returned str"),
    "labels": (lambda net: lambda x: net(x).argmax(1), "model: it returns torch.int64"),
    "a number": (lambda net: 3, "model: int cannot be asked"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_audited_is_one_sentence(kind, net, sides):
    make, sentence = REFUSED[kind]
    with pytest.raises(secateur.WrongInput, match=f"^{sentence}"):
        secateur.audit(make(net), *sides)


def test_inputs_of_a_type_that_does_not_fit_are_one_sentence(net, sides):
    whole = [(inputs.long(), labels) for inputs, labels in sides]
    with pytest.raises(secateur.WrongInput, match=r"^model: must accept inputs .* torch.int64; it raised RuntimeError"):
        secateur.audit(net, *whole)


def test_nonmembers_of_another_shape_are_one_sentence(net, sides):
    wider = torch.cat([sides[1][0], sides[1][0]], 1), sides[1][1]
    with pytest.raises(secateur.WrongInput, match=r"^nonmembers: have inputs of the shape \(40,\), and the members"):
        secateur.audit(net, sides[0], wider)


def test_the_number_of_classes_and_the_kind_of_outputs_can_be_said(net, sides):
    inputs = sides[0][0]
    with pytest.raises(secateur.WrongInput, match="model: it answers with 2 classes; the data has 3"):
        secateur.wrap(net, classes=3).predict(inputs)
    logits = Answering(net, lambda y: y.softmax(1))
    again = secateur.wrap(logits, outputs="logits").predict(inputs)
    assert torch.allclose(again, net(inputs).softmax(1).softmax(1))
    with pytest.raises(secateur.WrongInput, match="outputs: 'log' is not known"):
        secateur.wrap(net, outputs="log")
    with pytest.raises(secateur.WrongInput, match=r"no probabilities; say what it returns"):
        secateur.wrap(net, outputs="probabilities").predict(inputs)


def test_a_wrapped_model_is_a_shadow_too(net, sides):
    other = examples(1)
    forest = RandomForestClassifier(10, random_state=0).fit(*(part.numpy() for part in other[0]))
    report = secateur.audit(net, *sides, shadows=[(forest, *other)], attacks="conf")
    assert report.value("balanced_accuracy", "conf") > 0.5


# Inputs of several tensors -------------------------------------------------------------------------------------------
class Reader(nn.Module):
    """A text classifier that reads tokens where the attention mask is one, and a number beside them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(50, 16), nn.Linear(17, 2)

    def forward(self, input_ids, attention_mask, weight):
        words = self.embedding(input_ids) * attention_mask[..., None]
        return types.SimpleNamespace(logits=self.layer(torch.cat([words.sum(1), weight[:, None]], 1)))


@pytest.fixture(scope="session")
def read():
    rng = torch.Generator().manual_seed(0)

    def side():
        lengths = torch.randint(1, 8, (ROWS, 1), generator=rng)
        tokens = torch.randint(50, (ROWS, 7), generator=rng)
        inputs = {"input_ids": tokens, "attention_mask": (torch.arange(7) < lengths).long()}
        inputs["weight"] = torch.rand(ROWS, generator=rng)
        return inputs, torch.randint(2, (ROWS,), generator=rng)

    sides = [side(), side()]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Reader()
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(**sides[0][0]).logits, sides[0][1]).backward()
        optimiser.step()
    return net.eval(), sides


def test_inputs_of_several_tensors_reach_the_model_as_they_are(read):
    net, sides = read
    both = {name: torch.cat([inputs[name] for inputs, _ in sides]) for name in sides[0][0]}
    own = own_auc(net(**both).logits.softmax(1).detach(), sides)
    assert own > 0.7 and audited(net, sides) == pytest.approx(own, abs=1e-3)
    in_order = [(tuple(inputs.values()), labels) for inputs, labels in sides]
    assert audited(net, in_order) == pytest.approx(own, abs=1e-3)
    assert audited(lambda *parts: net(*parts).logits.detach(), in_order) == pytest.approx(own, abs=1e-3)
    report = secateur.audit(net, *sides)  # attacks that move inputs are left out
    assert "blindmi" in {row.attack for row in report.rows} and not {"samia"} & {row.attack for row in report.rows}


def test_inputs_that_do_not_fit_together_are_one_sentence(read):
    net, sides = read
    short = {name: value[:-1] if name == "weight" else value for name, value in sides[0][0].items()}
    with pytest.raises(secateur.WrongInput, match=r"members: the tensors of the inputs have 60, 60, 59 rows"):
        secateur.audit(net, (short, sides[0][1]), sides[1])
    renamed = {name.upper(): value for name, value in sides[1][0].items()}
    with pytest.raises(secateur.WrongInput, match=r"nonmembers: have inputs of other names"):
        secateur.audit(net, sides[0], (renamed, sides[1][1]))
    with pytest.raises(secateur.WrongInput, match="one input tensor can be pruned"):
        secateur.audit(net, *sides, pruner="l1-unstructured")
    with pytest.raises(secateur.WrongInput, match=r"taken by secateur\.audit alone"):
        secateur.invert(net, sides[0], "dlg", mean=[0.5], std=[0.5])
    with pytest.raises(secateur.WrongInput, match="which is empty"):
        secateur.audit(net, *((torch.empty(ROWS, 0), labels) for _, labels in sides))


def test_a_program_of_seven_rows_is_asked_seven_at_a_time(net, sides):
    program = torch.export.export(net, (torch.zeros(7, WIDTH),))
    assert 2 * ROWS % 7  # the last part is not whole
    answers = net(torch.cat([inputs for inputs, _ in sides])).softmax(1).detach()
    assert audited(program, sides) == pytest.approx(own_auc(answers, sides), abs=1e-3)
