"""Data in the forms that users have: each audit's confidence AUC is scikit-learn's on the same rows."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import secateur
from secateur.cli import main
from secateur.data.columns import read_table
from secateur.data.examples import read_examples
from secateur.data.load import load
from secateur.data.scaling import DataForm
from secateur.errors import WrongInput

INSIDE, ALL = 120, 300


def learn(net, inputs, labels, steps=60):
    """Train a network to know its members by heart."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimiser.step()
    return net.eval()


def confidences(net, inputs, labels):
    with torch.no_grad():
        return net(inputs).softmax(1).gather(1, labels[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def table():
    """Return a network, rows of 30 measurements and labels of which a third are wrong, so that it learns by heart."""
    torch.manual_seed(0)
    raw = load_breast_cancer()
    inputs = torch.from_numpy((raw.data / raw.data.max(0))[:ALL].astype(np.float32))
    labels = torch.from_numpy(raw.target[:ALL].copy())
    flipped = torch.rand(ALL, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = torch.where(flipped, 1 - labels, labels)
    net = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    return learn(net, inputs[:INSIDE], labels[:INSIDE], 150), inputs, labels


class Pairs(TorchDataset):
    """A data set of (input, label), one by one."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


class Stream(IterableDataset):
    """A data set that can only be iterated."""

    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __iter__(self):
        return ({"x": x, "y": y} for x, y in zip(self.inputs, self.labels, strict=True))


def build_columns(inputs, labels, form=None):
    """Return a Hugging Face data set, plain or with a format."""
    import datasets

    return datasets.Dataset.from_dict({"input_ids": inputs.tolist(), "label": labels.tolist()}).with_format(form)


def build_frame(inputs, labels):
    """Return a pandas frame whose labels are texts."""
    import pandas

    frame = pandas.DataFrame({f"c{i:02}": inputs[:, i].numpy() for i in range(inputs.shape[1])})
    return frame.assign(diagnosis=["ill" if label else "healthy" for label in labels.tolist()])


FORMS = {
    "tensors": lambda x, y: (x, y),
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "float64 numpy": lambda x, y: (x.double().numpy(), y.numpy()),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "a list of pairs": lambda x, y: list(zip(x, y.tolist(), strict=True)),
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "IterableDataset": Stream,
    "DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32),
    "DataLoader of dictionaries": lambda x, y: DataLoader(Stream(x, y), batch_size=32),
    "Hugging Face": build_columns,
    "Hugging Face, as tensors": lambda x, y: build_columns(x, y, "torch"),
    "frame": build_frame,
}


@pytest.mark.parametrize("form", FORMS)
def test_python_takes_it(table, form):
    net, inputs, labels = table
    build = FORMS[form]
    sides = [build(inputs[:INSIDE], labels[:INSIDE]), build(inputs[INSIDE:], labels[INSIDE:])]
    report = secateur.audit(net, *sides, attacks="conf", label="diagnosis" if form == "frame" else "label")
    truth = [True] * INSIDE + [False] * (ALL - INSIDE)
    wanted = roc_auc_score(truth, confidences(net, inputs, labels))
    assert wanted > 0.6 and report.value("auc", "conf") == pytest.approx(wanted, abs=1e-3)


MODULE = """
import numpy as np
import torch
from torch import nn
def table(): return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
def pictures(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
def text(): return nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 3))
def tokens(): return dict(np.load("tokens.npz"))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, table):
    """Return a folder with networks, their weights, and data in files of every kind."""
    folder, (net, inputs, labels) = tmp_path_factory.mktemp("kinds"), table
    (folder / "kinds_of_data.py").write_text(MODULE)
    save_file(net.state_dict(), folder / "table.safetensors")
    rows = [
        [*map(repr, x), "benign" if y else "abnormal"] for x, y in zip(inputs.tolist(), labels.tolist(), strict=True)
    ]
    with (folder / "table.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([[f"c{i}" for i in range(30)] + ["diagnosis"], *rows])
    import pyarrow
    import pyarrow.parquet

    columns = {f"c{i}": inputs[:, i].numpy() for i in range(30)} | {"diagnosis": labels.numpy()}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet")
    np.savez(folder / "table.npz", x=inputs.numpy(), y=labels.numpy(), train_size=INSIDE)
    _write_pictures(folder)
    _write_text(folder)
    return folder


def _write_pictures(folder):
    """Write digits as an image folder of two sizes, in an order by class."""
    torch.manual_seed(0)
    loaded = load_digits()
    pictures, labels = (loaded.images[:ALL] * 15).astype(np.uint8), loaded.target[:ALL]
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        (folder / "pictures" / str(label)).mkdir(parents=True, exist_ok=True)
        side = 8 if i % 2 else 16
        Image.fromarray(picture).resize((side, side), 0).save(folder / "pictures" / str(label) / f"{i:03}.png")
    order = sorted(range(ALL), key=lambda i: (str(labels[i]), i))
    inputs, targets = torch.from_numpy(pictures[order]).float()[:, None] / 255, torch.from_numpy(labels[order].copy())
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    save_file(learn(net, inputs, targets).state_dict(), folder / "pictures.safetensors")


def _write_text(folder):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 50, (ALL, 6)), rng.integers(0, 3, ALL)
    net = nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 3))
    inputs, targets = torch.from_numpy(tokens), torch.from_numpy(labels)
    learn(net, inputs[:INSIDE], targets[:INSIDE], 150)
    np.savez(folder / "tokens.npz", inputs=tokens, labels=labels, train_size=INSIDE)
    save_file(net.state_dict(), folder / "text.safetensors")
    np.save(folder / "tokens.npy", confidences(net, inputs, targets))


@pytest.mark.parametrize("source", ["tokens.npz", "kinds_of_data:tokens"])
def test_the_command_takes_tokens(folder, tmp_path, capsys, monkeypatch, source):
    monkeypatch.chdir(folder)
    rows = audit(capsys, tmp_path, "text", "--data", source, "--weights", "text.safetensors")
    check_auc(rows, tmp_path, np.load("tokens.npy"))


def test_the_command_takes_tables(folder, table, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    rows = audit(capsys, tmp_path, "table", "--data", "table.npz", "--weights", "table.safetensors")
    check_auc(rows, tmp_path, confidences(*table))


@pytest.mark.parametrize("source", ["table.csv", "table.parquet"])
def test_a_trained_model_and_a_table_whose_first_rows_are_members(folder, table, tmp_path, capsys, monkeypatch, source):
    monkeypatch.chdir(folder)
    flags = ["--label", "diagnosis", "--train-size", INSIDE, "--weights", "table.safetensors"]
    rows = audit(capsys, tmp_path, "table", "--data", source, *flags)
    check_auc(rows, tmp_path, confidences(*table))


@pytest.mark.parametrize("source", ["table.csv", "table.parquet", "pictures"])
def test_the_command_trains_on_it(folder, tmp_path, capsys, monkeypatch, source):
    monkeypatch.chdir(folder)
    model = "pictures" if source == "pictures" else "table"
    flags = ["--label", "diagnosis", "--resize", "8", "--shadows", "0", "--set", "train.epochs=20"]
    rows = audit(capsys, tmp_path, model, "--data", source, *flags, "--export", tmp_path / "models")
    (file,) = (tmp_path / "models").glob("*.safetensors")
    data = load(source, form=DataForm(label="diagnosis", resize=8))
    check_auc(rows, tmp_path, confidences(secateur.load_pruned(file), data.inputs, data.labels))


def audit(capsys, tmp_path, model, *flags):
    given = ["--model", f"kinds_of_data:{model}", "--pruner", "none", "--attack", "conf", "--out", tmp_path / "run"]
    code = main(["audit", *map(str, [*given, *flags, "--json"])])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def check_auc(rows, tmp_path, confidence):
    lines = list(csv.DictReader((tmp_path / "run" / "records.csv").open()))
    ids = [int(line["id"]) for line in lines]
    wanted = roc_auc_score([line["member"] == "1" for line in lines], confidence[ids])
    (auc,) = (row["value"] for row in rows if row["metric"] == "auc")
    assert auc == pytest.approx(wanted, abs=1e-3)


def test_tables_of_numbers_and_categories():
    columns = {"size": np.array(["1.5", "2"]), "colour": np.array(["red", "blue"]), "y": np.array(["b", "a"])}
    inputs, labels, names = read_table("t", columns, "y")
    assert names == ["size", "colour=blue", "colour=red"] and labels.tolist() == [1, 0]
    assert inputs.tolist() == [[1.5, 0, 1], [2, 1, 0]]


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (np.array([f"name {i}" for i in range(200)]), "200 different texts, which are neither numbers nor categories"),
        (np.array([1.0] * 199 + [np.nan]), "missing or infinite"),
        (np.array(["2020-01-01"] * 200, dtype="datetime64[D]"), "neither numbers nor texts"),
    ],
)
def test_a_column_that_is_neither_is_named(column, problem):
    with pytest.raises(WrongInput, match=f"column extra of t has .*{problem.split(', ')[-1].split(' (')[0]}"):
        read_table("t", {"extra": column, "label": np.zeros(200)}, "label")


def test_a_label_that_is_not_there_is_named():
    with pytest.raises(WrongInput, match="label: t has no column 'label'; name one of a, b"):
        read_table("t", {"a": np.zeros(2), "b": np.zeros(2)}, "label")


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        (3, "int is not allowed; use"),
        ([], "list is not allowed"),
        (TensorDataset(torch.zeros(3, 2)), "yields tuple; it must yield pairs"),
        (Stream([], []), "has no examples"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 1)], r"different shapes, \(2,\) and \(3,\)"),
        ((["a", "b"], [0, 1]), "inputs are not readable"),
    ],
)
def test_what_is_no_data_gets_a_sentence(examples, problem):
    with pytest.raises(WrongInput, match=f"members: .*{problem}"):
        read_examples("members", examples)


def test_labels_from_1_get_the_way_out(table):
    net, inputs, labels = table
    with pytest.raises(WrongInput, match="labels must start at 0: use labels - 1"):
        secateur.audit(net, (inputs[:INSIDE], labels[:INSIDE] + 1), (inputs[INSIDE:], labels[INSIDE:] + 1))
