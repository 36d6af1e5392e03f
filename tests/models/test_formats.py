"""Files of models: what they hold is read, and a file that would execute code is refused before it is read."""

import io
import json
import pickle
import subprocess
import sys
import types
import warnings
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import secateur
from secateur.models.create import load_weights
from secateur.models.formats import check_program, is_brought, key_of_model, load_model

WIDTH = 6


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="module")
def rows():
    return torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(1))


def export_onnx(net, path, rows=None):
    dynamic = {"dynamic_shapes": ({0: torch.export.Dim("rows", min=1, max=1000)},)} if rows is None else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(rows or 2, WIDTH),), path, dynamo=True, verbose=False, **dynamic)
    return path


def export_program(net, path, example=None):
    dynamic = ({0: torch.export.Dim("rows", min=1, max=1000)},)
    program = torch.export.export(net, (torch.zeros(2, WIDTH),), dynamic_shapes=dynamic)
    torch.export.save(program, path)
    return path


def script(net, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(net).save(path)
    return path


def test_all_files_of_one_network_agree(net, rows, tmp_path):
    wanted = net(rows).softmax(1).detach()
    files = [
        export_onnx(net, tmp_path / "net.onnx"),
        export_onnx(net, tmp_path / "seven.onnx", rows=7),  # rows are asked by sevens, and the last ones filled up
        export_program(net, tmp_path / "net.pt2"),
        script(net, tmp_path / "net.pt"),
    ]
    for file in files:
        assert is_brought(str(file)) and len(key_of_model(file)) == 64
        torch.testing.assert_close(secateur.wrap(file).predict(rows), wanted, atol=1e-5, rtol=0)
    assert len({key_of_model(file) for file in files}) == 4


def test_state_dicts_of_every_kind_fill_a_network(net, rows, tmp_path):
    masked = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
    masked.load_state_dict(net.state_dict())
    prune.l1_unstructured(masked[0], "weight", 0.5)
    states = {
        "plain.pt": net.state_dict(),
        "parallel.pth": {f"module.{name}": value for name, value in net.state_dict().items()},
        "checkpoint.pt": {"epoch": 3, "state_dict": net.state_dict()},
        "masked.pt": masked.state_dict(),
    }
    for name, state in states.items():
        torch.save(state, tmp_path / name)
        fresh = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
        wanted = (masked if name == "masked.pt" else net)(rows).softmax(1).detach()
        torch.testing.assert_close(secateur.wrap(fresh, weights=tmp_path / name).predict(rows), wanted)
    assert (load_weights(fresh, tmp_path / "masked.pt")[0].weight == 0).sum() == 24


class Trap:
    """An object that runs a command when it is unpickled."""

    file = None

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def test_a_pickle_is_never_read(net, tmp_path):
    Trap.file = tmp_path / "sprung"
    torch.save(net, tmp_path / "whole.pt")
    torch.save({"weight": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "forest.pkl").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "forest.joblib").write_bytes(b"")
    for name in ("whole.pt", "trap.pt", "forest.pkl", "forest.joblib"):
        for ask in (lambda path: secateur.wrap(path), lambda path: secateur.wrap(net, weights=path)):
            with pytest.raises(secateur.WrongInput, match=r"torch\.save\(model\.state_dict\(\), 'weights\.pt'\)"):
                ask(tmp_path / name)
    assert not Trap.file.exists()


def test_weights_and_models_are_told_apart(net, tmp_path):
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(secateur.WrongInput, match=r"holds weights without a structure; .* --weights"):
        secateur.wrap(tmp_path / "weights.pt")
    with pytest.raises(secateur.WrongInput, match="is a TorchScript model, not weights"):
        secateur.wrap(net, weights=script(net, tmp_path / "script.pt"))
    with pytest.raises(secateur.WrongInput, match=r"weights: are for an nn\.Module"):
        secateur.wrap(lambda x: x, weights=tmp_path / "weights.pt")
    with pytest.raises(secateur.WrongInput, match=r"missing\.onnx is not a file"):
        secateur.wrap(tmp_path / "missing.onnx")
    with pytest.raises(secateur.WrongInput, match=r"resnet18 cannot be asked; use a file"):
        secateur.wrap("resnet18")
    for name in ("bad.onnx", "bad.pt2", "bad.pt"):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(secateur.WrongInput, match=r"^(model|weights): .*bad"):
            secateur.wrap(tmp_path / name)


# A program of torch.export is checked before PyTorch reads it --------------------------------------------------------
def rewritten(source, target, change):
    """Copy an archive; `change` gets each part's name and content, and returns its new content or None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            inside = name.partition("/")[2]
            new.writestr(name, change(inside, old.read(name)) or old.read(name))
    return target


def pickled(name, content):
    if name == "data/sample_inputs/model.pt":
        buffer = io.BytesIO()
        torch.save(Trap(), buffer)
        return buffer.getvalue()


def flagged(name, content):
    return (
        content.replace(b'"use_pickle": false', b'"use_pickle": true') if name.endswith("weights_config.json") else None
    )


def targeted(name, content):
    return content.replace(b"torch.ops.aten.relu.default", b"torch.os.system") if name.startswith("models/") else None


def evaluated(name, content):
    if not name.startswith("models/"):
        return None
    text = content.decode()
    program = json.loads(text)
    sizes = program["graph_module"]["graph"]["tensor_values"]["input"]["sizes"]
    sizes[0]["as_expr"]["expr_str"] = "__import__('os').system('true')"
    return json.dumps(program).encode()


@pytest.mark.parametrize("change", [pickled, flagged, targeted, evaluated])
def test_a_program_that_would_execute_code_is_refused(change, net, tmp_path):
    Trap.file = tmp_path / "sprung"
    plain = export_program(net, tmp_path / "plain.pt2")
    check_program(plain)
    trap = rewritten(plain, tmp_path / "trap.pt2", change)
    with pytest.raises(secateur.WrongInput, match=r"trap\.pt2 (would execute code|cannot be read)"):
        secateur.wrap(trap)
    assert not Trap.file.exists()


class Rounded(nn.Module):
    """A layer whose weights are rounded to int8, in the operations of a quantised program."""

    def __init__(self, layer):
        super().__init__()
        import torch.ao.quantization.fx._decomposed

        self.register_buffer("weight", (layer.weight.detach() / 0.01).round().clamp(-128, 127).to(torch.int8))

    def forward(self, x):
        restore = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        return x @ restore(self.weight, 0.01, 0, -128, 127, torch.int8).T


def test_an_int8_program_is_read_in_a_process_that_made_none(net, rows, tmp_path):
    layer = Rounded(net[0])
    export_program(layer, tmp_path / "int8.pt2")
    asked = f"secateur.wrap({str(tmp_path / 'int8.pt2')!r}).predict(torch.ones(3, 6))"
    code = f"import secateur, torch; print({asked}[0, 0].item())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(layer(torch.ones(3, WIDTH)).softmax(1)[0, 0].item(), abs=1e-5)


# ONNX ----------------------------------------------------------------------------------------------------------------
def test_onnx_refuses_inputs_of_another_type(net, rows, tmp_path):
    box = secateur.wrap(export_onnx(net, tmp_path / "net.onnx"))
    assert box.predict(rows.double()).shape == (300, 3)  # floats are converted
    with pytest.raises(secateur.WrongInput, match=r"inputs: are torch\.int64; the ONNX model takes tensor\(float\)"):
        box.predict(rows.long())


def test_without_onnx_runtime_the_extra_is_named(net, tmp_path, hide):
    file = export_onnx(net, tmp_path / "net.onnx")
    hide("onnxruntime")
    with pytest.raises(secateur.WrongInput, match="onnxruntime: is not installed"):
        secateur.wrap(file)


# Hugging Face and timm -----------------------------------------------------------------------------------------------
def test_a_text_and_an_image_classifier_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "num_labels": 3,
    }
    torch.manual_seed(0)
    text = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **small)).eval()
    image = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **small)
    ).eval()
    tokens = torch.randint(30, (5, 7), generator=torch.Generator().manual_seed(0))
    pixels = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for name, model, inputs in (("text", text, tokens), ("image", image, pixels)):
        model.save_pretrained(tmp_path / name)
        wanted = model(inputs).logits.softmax(1).detach()
        box = secateur.wrap(f"hf:{tmp_path / name}")
        torch.testing.assert_close(box.predict(inputs), wanted, atol=1e-5, rtol=0)
        assert len(key_of_model(f"hf:{tmp_path / name}")) == 64
    (tmp_path / "text" / "model.safetensors").unlink()
    with pytest.raises(secateur.WrongInput, match=r"save it by model\.save_pretrained"):
        secateur.wrap(f"hf:{tmp_path / 'text'}")


def test_a_network_of_timm_is_made_like_any_other(monkeypatch, hide):
    """timm needs torchvision, which is not among the packages of the tests: a stand-in takes its one function."""
    from secateur.models.create import create

    calls = {}

    def create_model(name, **options):
        calls.update(options, name=name)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, options["num_classes"]))

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model, __spec__=1))
    create("timm:resnet18", (1, 8, 8), 10, torch.Generator().manual_seed(0))
    assert calls == {"name": "resnet18", "pretrained": False, "num_classes": 10, "in_chans": 1}
    hide("timm")
    with pytest.raises(secateur.WrongInput, match="timm: is not installed"):
        create("timm:resnet18", (1, 8, 8), 10, torch.Generator().manual_seed(0))


def test_damaged_archives_are_one_sentence(net, tmp_path):
    weights, model = tmp_path / "weights.pt", tmp_path / "script.pt"
    torch.save(net.state_dict(), weights)
    script(net, model)
    middle = weights.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x03")  # the archive's list of members
    weights.write_bytes(middle)
    with pytest.raises(secateur.errors.WrongInput, match="damaged"):
        load_weights(net, weights)
    rewritten(
        model, tmp_path / "broken.pt", lambda name, content: b"\x9d" + content if name.endswith(".py") else content
    )
    with pytest.raises(secateur.errors.WrongInput, match="cannot be read as TorchScript"):
        secateur.models.formats.load_model(tmp_path / "broken.pt")


def test_metadata_of_another_form_are_one_sentence(net, tmp_path):
    path = tmp_path / "weights.safetensors"
    for content in ("3", '{"config": 3}', "[]"):
        save_file(net.state_dict(), path, {"secateur": content})
        with pytest.raises(secateur.errors.WrongInput, match="metadata"):
            load_weights(net, path)


def test_torchscript_is_read_without_a_warning_of_torch(net, tmp_path):
    """Torch deprecates it, of which a user of a finished model cannot make use."""
    path = tmp_path / "script.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(net).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(load_model(path), nn.Module)
