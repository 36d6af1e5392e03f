"""`secateur audit --model FILE`: models that can only be asked, as files, before and after, and at an address."""

import json
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.utils import prune

from secateur.cli import main
from secateur.errors import WrongInput
from secateur.models.endpoint import Endpoint
from secateur.models.small import digits_cnn
from secateur.runs.folder import load_rows

ROWS, WIDTH = 60, 20
NET = """
from torch import nn


def net():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
"""


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A folder with a network that learnt its members by heart: its data, weights, and forms that can be asked."""
    folder = tmp_path_factory.mktemp("brought")
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(2 * ROWS, WIDTH, generator=rng), torch.randint(2, (2 * ROWS,), generator=rng)
    np.savez(folder / "own.npz", inputs=inputs.numpy(), labels=labels.numpy(), train_size=ROWS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 2))
    optimiser = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[:ROWS]), labels[:ROWS]).backward()
        optimiser.step()
    net.eval()
    torch.save(net.state_dict(), folder / "net.pt")
    dynamic = ({0: torch.export.Dim("rows", min=1, max=100_000)},)
    program = torch.export.export(net, (torch.zeros(2, WIDTH),), dynamic_shapes=dynamic)
    torch.export.save(program, folder / "net.pt2")
    torch.onnx.export(program, (), folder / "net.onnx", dynamo=True, verbose=False)
    torch.jit.trace(net, torch.zeros(2, WIDTH)).save(folder / "script.pt")
    prune.l1_unstructured(net[0], "weight", 0.7)
    torch.save(net.state_dict(), folder / "pruned.pt")
    (folder / "own_net.py").write_text(NET)
    answers = torch.jit.load(folder / "script.pt")(inputs).softmax(1).detach()
    confidence = answers[torch.arange(2 * ROWS), labels]
    auc = roc_auc_score(np.repeat([1, 0], ROWS), confidence.numpy())
    return folder, auc


def audit(out, *flags):
    return main(["audit", "--out", str(out), "--inputs-are", "normalised", *map(str, flags)])


def values(out, metric, **labels):
    rows = [row for row in load_rows(out) if row.metric == metric]
    return [row.value for row in rows if all(getattr(row, name) == value for name, value in labels.items())]


@pytest.mark.parametrize("file", ["net.onnx", "net.pt2", "script.pt"])
def test_a_file_is_audited_as_it_is(file, brought, tmp_path):
    folder, auc = brought
    assert audit(tmp_path / "run", "--model", folder / file, "--data", folder / "own.npz") == 0
    assert values(tmp_path / "run", "auc", attack="conf") == [pytest.approx(auc, abs=1e-3)]
    attacks = {row.attack for row in load_rows(tmp_path / "run")}
    assert attacks == {None, "conf", "xent", "entropy", "mentr", "top1-conf", "correctness", "blindmi"}
    assert file in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("file", ["net.onnx", "net.pt2"])
def test_members_and_others_that_are_swapped_pass_no_limit(file, brought, tmp_path, capsys):
    folder, _ = brought
    arrays = dict(np.load(folder / "own.npz"))
    swapped = {name: arrays[name][::-1] for name in ("inputs", "labels")}
    np.savez(tmp_path / "swapped.npz", **swapped, train_size=ROWS)
    limits = ["--set", "limits.auc=.8", "--set", "limits.attacker=no-shadows", "--attack", "conf"]
    assert audit(tmp_path / "run", "--model", folder / file, "--data", tmp_path / "swapped.npz", *limits) == 3
    assert "swapped" in {row.extra.get("check") for row in load_rows(tmp_path / "run") if row.value == 0}
    assert "members and others look swapped" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(("form", "said"), [("Softmax", "returns probabilities"), ("LogSoftmax", "log-probabilities")])
def test_outputs_that_are_no_logits_are_not_softmaxed_again_and_that_is_said(form, said, brought, tmp_path, capsys):
    folder, auc = brought
    net = nn.Sequential(torch.jit.load(folder / "script.pt"), getattr(nn, form)(1))
    torch.jit.trace(net, torch.zeros(2, WIDTH)).save(tmp_path / "mine.pt")
    flags = ["--model", tmp_path / "mine.pt", "--data", folder / "own.npz", "--attack", "conf"]
    assert audit(tmp_path / "run", *flags) == 0
    assert values(tmp_path / "run", "auc", attack="conf") == [pytest.approx(auc, abs=1e-3)]
    (note,) = [row.note for row in load_rows(tmp_path / "run") if row.extra.get("check") == "outputs"]
    assert said in note and note in " ".join(capsys.readouterr().out.split())
    assert note in (tmp_path / "run" / "report.html").read_text()


def test_the_run_file_that_a_run_leaves_repeats_it(brought, tmp_path):
    folder, _ = brought
    flags = ["--model", folder / "script.pt", "--data", folder / "own.npz", "--attack", "conf"]
    assert audit(tmp_path / "run", *flags) == 0
    assert main(["audit", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert values(tmp_path / "run", "auc") == values(tmp_path / "again", "auc")
    assert audit(tmp_path / "ppb", *flags, "--defense", "ppb") == 2


def test_a_changed_file_is_asked_again_and_an_equal_one_is_not(brought, tmp_path, capsys):
    folder, _ = brought
    model = tmp_path / "mine.pt"
    model.write_bytes((folder / "script.pt").read_bytes())
    flags = ["--model", model, "--data", folder / "own.npz", "--attack", "conf,lira"]
    assert audit(tmp_path / "run", *flags) == 0
    first = sorted((tmp_path / "run" / "artifacts").iterdir())
    assert audit(tmp_path / "run", *flags) == 0
    assert sorted((tmp_path / "run" / "artifacts").iterdir()) == first
    assert values(tmp_path / "run", "auc", attack="lira") == [None]  # there are no shadow models
    other = torch.jit.trace(nn.Linear(WIDTH, 2), torch.zeros(2, WIDTH))
    other.save(model)
    assert audit(tmp_path / "run", *flags) == 0
    assert len(list((tmp_path / "run" / "artifacts").iterdir())) > len(first)


def test_before_and_after_are_weights_of_ones_own_function(brought, tmp_path, monkeypatch):
    folder, auc = brought
    monkeypatch.chdir(folder)
    flags = ["--model", "own_net:net", "--weights", "pruned.pt", "--before", "net.pt", "--data", "own.npz"]
    assert audit(tmp_path / "run", *flags) == 0
    before, after = (values(tmp_path / "run", "auc", attack="conf", pruner=name) for name in ("none", "given"))
    assert before == [pytest.approx(auc, abs=1e-3)]
    assert values(tmp_path / "run", "auc_change", attack="conf") == [pytest.approx(after[0] - before[0])]
    assert len(values(tmp_path / "run", "accuracy_drop")) == 1
    layers = {row.extra["layer"]: row.value for row in load_rows(tmp_path / "run") if row.metric == "layer_sparsity"}
    assert layers["0"] == pytest.approx(0.7) and layers["2"] == 0
    files = ["--model", folder / "script.pt", "--before", folder / "net.onnx", "--data", folder / "own.npz"]
    assert audit(tmp_path / "files", *files) == 0
    assert values(tmp_path / "files", "auc_change", attack="conf") == [0]


def test_a_file_of_prune_with_removed_channels_is_audited_for_ones_own_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (
        "from secateur.models.small import digits_cnn\n\n\ndef net(input_shape, classes):\n    return digits_cnn()\n"
    )
    (tmp_path / "own_cnn.py").write_text(source)
    inputs, labels = np.random.default_rng(0).normal(size=(60, 1, 8, 8)), np.arange(60) % 10
    np.savez("own.npz", inputs=inputs.astype(np.float32), labels=labels, train_size=40)
    shared = ["--model", "own_cnn:net", "--data", "own.npz"]
    few = ["--set", "train.epochs=1", "--set", "finetune.epochs=1"]
    assert main(["prune", *shared, "--pruner", "l1-structured", "--remove", "--out", "small.safetensors", *few]) == 0
    assert audit("run", *shared, "--weights", "small.safetensors", "--pruner", "none", "--attack", "conf") == 0
    removed = values("run", "parameters_masked", pruner="none")
    plain = sum(value.numel() for value in digits_cnn().parameters())
    assert removed[0] < 0.7 * plain and values("run", "auc", attack="conf")[0] is not None


def test_a_dry_run_reads_the_model_and_trains_nothing(brought, tmp_path, capsys):
    folder, _ = brought
    flags = ["--model", folder / "net.onnx", "--data", folder / "own.npz", "--dry-run"]
    assert audit(tmp_path / "run", *flags) == 0
    assert "about 60 members and 60 non-members" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "net.onnx", "--pruner", "l1-unstructured"], "pruner: needs training"),
        (["--model", "net.onnx", "--shadows", "3"], "shadows: needs training"),
        (["--model", "net.onnx", "--attack", "lira"], "attack: lira needs shadow models; from Python secateur.audit("),
        (["--model", "net.onnx", "--weights", "net.pt"], "weights: net.onnx has its own"),
        (["--model", "net.pt"], "net.pt holds weights without a structure"),
        (["--model", "net.pkl"], "model: net.pkl would execute code to be read"),
        (["--model", "absent.pt2"], "model: absent.pt2 is not a file"),
        (["--model", "digits-cnn", "--before", "net.pt"], "before: needs the model after as a file"),
        (["--model", "three.pt"], "model: it answers with 3 classes; the data has 2"),
        (["--model", "wide.pt"], "model: must accept inputs of the shape (20,)"),
        (["--model", "nan.pt"], "model: returned NaN"),
        (["--model", "noisy.pt"], "model: it answers the same input differently"),
        (["--model", "channels.pt", "--data", "last.npz"], "pictures must be (N, channels, height, width)"),
        (["--model", "apart/net.onnx"], "keep net.onnx.data beside it"),
        (["--model", "net.onnx", "--data", "all.npz"], "all has 0 rows after its 120 members"),
    ],
)
def test_a_wrong_model_is_one_sentence(flags, sentence, brought, tmp_path, monkeypatch, capsys):
    folder, _ = brought
    monkeypatch.chdir(folder)
    layers = {"three.pt": nn.Linear(WIDTH, 3), "wide.pt": nn.Linear(WIDTH + 1, 2), "channels.pt": nn.Conv2d(1, 2, 3)}
    layers |= {"nan.pt": nn.Sequential(nn.Linear(WIDTH, 2), nn.Threshold(1e9, float("nan"))), "noisy.pt": Noisy()}
    for name, layer in layers.items():
        torch.jit.script(layer).save(folder / name)
    arrays = dict(np.load(folder / "own.npz"))
    np.savez(folder / "all.npz", inputs=arrays["inputs"], labels=arrays["labels"])
    np.savez(folder / "last.npz", inputs=np.zeros((20, 8, 8, 1), np.float32), labels=np.arange(20) % 2, train_size=10)
    (folder / "apart").mkdir(exist_ok=True)
    (folder / "apart" / "net.onnx").write_bytes((folder / "net.onnx").read_bytes())  # without net.onnx.data
    rest = [] if "--data" in flags else ["--data", "own.npz"]
    assert audit(tmp_path / "run", *flags, *rest) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, True)


# A model behind an address -------------------------------------------------------------------------------------------
@pytest.fixture
def server(brought):
    """A server of the network on loopback; it notes requests, and fails as often as `failures` says."""
    net = torch.jit.load(brought[0] / "script.pt")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
            self.server.rows.append(len(asked))
            if self.server.failures:
                code = self.server.failures.pop()
                self.send_error(code)
                return
            answer = net(torch.tensor(asked)).softmax(1).tolist()
            body = self.server.answer(answer)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *rest):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.rows, server.failures = [], []
        server.answer = lambda answer: json.dumps({"predictions": answer}).encode()
        server.address = f"http://127.0.0.1:{server.server_port}/predict"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_endpoint_is_audited_and_never_asked_twice(server, brought, tmp_path):
    folder, auc = brought
    server.failures = [503]
    flags = ["--model", server.address, "--data", folder / "own.npz", "--attack", "conf,correctness"]
    assert audit(tmp_path / "run", *flags) == 0
    assert values(tmp_path / "run", "auc", attack="conf") == [pytest.approx(auc, abs=1e-3)]
    assert sum(server.rows[1:]) == 2 * ROWS + 2 and max(server.rows) <= 32  # one failed, and two rows are asked twice
    asked = len(server.rows)
    for file in (tmp_path / "run" / "artifacts").iterdir():  # as if the run had been killed before its stages
        file.unlink()
    saved = next((tmp_path / "run" / "answers").iterdir())
    saved.write_bytes(saved.read_bytes()[:-20])  # while it wrote its last line
    assert audit(tmp_path / "run", *flags) == 0
    assert values(tmp_path / "run", "auc", attack="conf") == [pytest.approx(auc, abs=1e-3)]
    assert sum(server.rows[asked:]) <= 32


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda answer: b"<html>", "does not answer with JSON"),
        (lambda answer: json.dumps({"result": answer}).encode(), "by something else than a list of rows"),
        (lambda answer: json.dumps(answer[:-1]).encode(), "by something else than a list of rows"),
        (lambda answer: json.dumps([["cat"]] * len(answer)).encode(), "by something else than a list of rows"),
        (lambda answer: json.dumps([[10**400]] * len(answer)).encode(), "by something else than a list of rows"),
        (lambda answer: b"[" * 100_000, "does not answer with JSON"),
        (lambda answer: json.dumps(answer).encode().ljust((64 << 20) + 1), "answers with over 64 MiB for 32 rows"),
    ],
)
def test_an_endpoint_that_answers_nonsense_is_one_sentence(answer, sentence, server, brought, tmp_path, capsys):
    server.answer = answer
    assert audit(tmp_path / "run", "--model", server.address, "--data", brought[0] / "own.npz") == 2
    assert sentence in capsys.readouterr().err


def test_an_answer_of_64_mib_is_read_and_no_more_is_taken(server, brought):
    """The server sends 256 MiB; the reader takes one byte more than it may use, and closes."""
    inputs = torch.from_numpy(np.load(brought[0] / "own.npz")["inputs"][:2])
    server.answer = lambda answer: json.dumps(answer).encode().ljust(64 << 20)
    assert Endpoint(server.address)(inputs).shape == (2, 2)
    server.answer = lambda answer: bytes(256 << 20)
    tracemalloc.start()
    with pytest.raises(WrongInput, match="over 64 MiB"):
        Endpoint(server.address)._ask(inputs.tolist())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < (256 + 2 * 64 + 16) << 20  # of which the server has the first 256


def test_an_endpoint_that_draws_its_answers_is_refused(server, brought, tmp_path, capsys):
    server.answer = lambda answer: json.dumps(torch.rand(len(answer), 2).softmax(1).tolist()).encode()
    assert audit(tmp_path / "run", "--model", server.address, "--data", brought[0] / "own.npz") == 2
    assert "answers the same input differently" in capsys.readouterr().err


def test_an_endpoint_that_is_down_or_refuses_is_one_sentence(server, brought, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("secateur.models.endpoint.PAUSE", 0.001)
    server.failures = [401]
    flags = ["--data", brought[0] / "own.npz"]
    assert audit(tmp_path / "a", "--model", server.address, *flags) == 2
    assert "did not answer (401" in capsys.readouterr().err and len(server.rows) == 1
    assert audit(tmp_path / "b", "--model", "http://127.0.0.1:9/none", *flags) == 2
    assert "did not answer" in capsys.readouterr().err


def test_a_file_is_compared_by_the_users_groups(brought, tmp_path, capsys):
    folder, _ = brought
    arrays = dict(np.load(folder / "own.npz"))
    np.savez(tmp_path / "wards.npz", **arrays, ward=np.arange(2 * ROWS) % 2)
    flags = ["--model", folder / "net.pt2", "--data", tmp_path / "wards.npz", "--attack", "conf"]
    assert audit(tmp_path / "run", *flags, "--group", "ward") == 0
    (worst,) = (row for row in load_rows(tmp_path / "run") if row.metric == "worst_group_auc")
    assert "the worst of 4" in worst.note  # two classes and two wards
    assert audit(tmp_path / "run", *flags, "--group", "floor") == 2
    assert "group: wards has no column 'floor'" in capsys.readouterr().err


FUNCTIONS = """
from pathlib import Path
import numpy as np, torch
from sklearn.ensemble import RandomForestClassifier
from own_net import net as new

FOLDER = Path(__file__).parent

def net():
    trained = new()
    trained.load_state_dict(torch.load(FOLDER / "net.pt"))
    return trained

def mapping():
    trained = net()
    trained.register_forward_hook(lambda module, inputs, outputs: {"logits": outputs})
    return trained

def int8():
    return torch.ao.quantization.quantize_dynamic(net(), {torch.nn.Linear}, dtype=torch.qint8)

def script():
    return torch.jit.load(FOLDER / "script.pt")

def forest():
    data = np.load(FOLDER / "own.npz")
    return RandomForestClassifier(10, random_state=0).fit(data["inputs"][:60], data["labels"][:60])
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["net", "mapping", "int8", "script", "forest"])
def test_a_trained_model_that_a_function_returns_is_audited_as_it_is(form, brought, tmp_path, monkeypatch, capsys):
    folder, auc = brought
    (folder / "own_trained.py").write_text(FUNCTIONS)
    monkeypatch.chdir(folder)
    flags = ["--model", f"own_trained:{form}", "--data", "own.npz", "--attack", "conf"]
    assert audit(tmp_path / "run", *flags, "--pruner", "none") == 0
    (measured,) = values(tmp_path / "run", "auc", attack="conf")
    assert (
        measured > 0.95 if form == "forest" else measured == pytest.approx(auc, abs=0.005 if form == "int8" else 1e-3)
    )
    assert audit(tmp_path / "other", *flags, "--pruner", "l1-unstructured") == 2
    assert "--pruner none" in capsys.readouterr().err


def test_given_weights_are_recognised_as_pruned_and_must_answer_twice_alike(brought, tmp_path, monkeypatch, capsys):
    folder, _ = brought
    monkeypatch.chdir(folder)
    flags = ["--weights", "pruned.pt", "--data", "own.npz", "--pruner", "none", "--attack", "conf"]
    assert audit(tmp_path / "run", "--model", "own_net:net", *flags) == 0
    layers = {row.extra["layer"]: row.value for row in load_rows(tmp_path / "run") if row.metric == "layer_sparsity"}
    assert layers["0"] == pytest.approx(0.7) and layers["2"] == 0
    said, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "run" / "report.html").read_text()
    assert "pruned as given," in said and "Weights gone, by layer: 0 70 %, 2 0 %." in said and "original" not in said
    assert "pruned as given, 64 % sparse" in page and "Sparsity by layer" in page
    assert set(values(tmp_path / "run", "auc")) and load_rows(tmp_path / "run")[0].sparsity == pytest.approx(0.6364)
    noisy = "\n\nclass Noisy(nn.Sequential):\n    def forward(self, x):\n"
    noisy += "        return super().forward(nn.functional.dropout(x, 0.5))\n"
    (tmp_path / "noisy_net.py").write_text(NET.replace("nn.Sequential(", "Noisy(") + noisy)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert audit(tmp_path / "run", "--model", "noisy_net:net", *flags) == 2
    assert "model: it answers the same input differently when asked again" in capsys.readouterr().err
