"""Files of models and of weights; a file that would execute code to be read is refused, with a way to convert it.

.onnx                ONNX Runtime, on the CPU.
.pt2                 a program of torch.export, checked before it is read: PyTorch would unpickle parts of it.
.pt, .pth            TorchScript, whose code is made of TorchScript's operations alone; or a state dict of tensors.
.safetensors         tensors.
hf:FOLDER            a Hugging Face classifier, saved as .safetensors.
http://, https://    an endpoint (endpoint.py).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import WrongInput, expand, require
from secateur.models.endpoint import Endpoint
from secateur.models.sparsity import fold_tensors

ASKED = (".onnx", ".pt2", ".pt", ".pth", ".ts")
PICKLES = (".pkl", ".pickle", ".joblib", ".bin", ".ckpt", ".sav", ".dill")
ADDRESSES = ("http://", "https://")
PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and of torch.compile
NESTED = ("state_dict", "model_state_dict", "model")  # entries of a training checkpoint that hold the weights
CONVERT = "save the weights alone: torch.save(model.state_dict(), 'weights.pt')"


def is_brought(source: str) -> bool:
    """Return True if a model is named by a file, a folder or an address, and so can only be asked.

    Example:
        >>> is_brought("net.onnx"), is_brought("hf:folder"), is_brought("resnet18"), is_brought("my:net")
        (True, True, False, False)
    """
    return source.startswith((*ADDRESSES, "hf:")) or Path(source).suffix.lower() in (*ASKED, *PICKLES)


def load_model(source: str | Path, cache: Path | None = None) -> Any:
    """Return the model of a file, a folder or an address, in a form that `wrap` takes.

    Args:
        source: the file, `hf:FOLDER` or the address.
        cache: folder in which the answers of an endpoint are kept.
    """
    name = str(source)
    if name.startswith(ADDRESSES):
        return Endpoint(name, cache)
    if name.startswith("hf:"):
        return _load_huggingface(expand(name.removeprefix("hf:")))
    path = expand(source)
    _check_readable("model", path)
    readers = {".onnx": OnnxModel, ".pt2": _load_program}
    return readers.get(path.suffix.lower(), _load_script)(path)


def key_of_model(source: str | Path) -> str:
    """Return the sha256 of a model's files; an endpoint has only its address."""
    name = str(source)
    if name.startswith(ADDRESSES):
        return hashlib.sha256(name.encode()).hexdigest()
    path = expand(name.removeprefix("hf:"))
    files = sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _check_readable(field: str, path: Path) -> None:
    """Refuse a file that is not there, or that pickle would have to read."""
    if path.suffix.lower() in PICKLES:
        way = "load it in Python and pass the object to secateur.audit"
        raise WrongInput(field, f"{path} would execute code to be read; {CONVERT}, or {way}")
    if not path.is_file():
        raise WrongInput(field, f"{path} is not a file")


# State dicts -------------------------------------------------------------------------------------------------------
def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .pt or .pth file by name, without the prefixes of wrappers and with masks folded."""
    _check_readable("weights", path)
    if is_script(path):
        raise WrongInput("weights", f"{path} is a TorchScript model, not weights; pass it as the model")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds for a file that it refuses
        raise WrongInput("weights", f"{path} holds more than tensors, or is damaged; {CONVERT}") from error
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise WrongInput("weights", f"{path} does not hold tensors by name; {CONVERT}")
    return clean_state(content)


def clean_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without the prefix that a wrapper gave to all names, and with masks folded.

    Example:
        >>> clean_state({"module.weight": torch.ones(1)})
        {'weight': tensor([1.])}
    """
    for prefix in PREFIXES:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return fold_tensors(state)


# TorchScript and torch.export --------------------------------------------------------------------------------------
def is_script(path: Path) -> bool:
    """Return True if a file is a TorchScript archive, which has code of its own."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):  # no archive, or a damaged one
        return False


def _load_script(path: Path) -> nn.Module:
    if not is_script(path):
        read_state(path)  # explains a pickle
        structure = "name its structure by --model module:function, and the file by --weights"
        raise WrongInput("model", f"{path} holds weights without a structure; {structure}")
    try:
        with warnings.catch_warnings():  # torch deprecates the format, which users cannot change here
            warnings.simplefilter("ignore")
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call,no-any-return]
    except Exception as error:  # torch's reader fails in many ways on a damaged file
        raise WrongInput("model", f"{path} cannot be read as TorchScript: {_first_line(error)}") from error


def _load_program(path: Path) -> torch.export.ExportedProgram:
    with suppress(ImportError):
        importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the operations of int8 programs
    try:
        check_program(path)
        if _is_quantised(path):
            require("torchao", "compress")
            import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401  (registers the operators of int8)
        return torch.export.load(path)
    except WrongInput:
        raise
    except Exception as error:  # torch's reader fails in many ways on a damaged file
        raise WrongInput("model", f"{path} cannot be read as a .pt2 file: {_first_line(error)}") from error


def _is_quantised(path: Path) -> bool:
    """Return True if a program calls the operators of int8 networks, which torchao registers."""
    with zipfile.ZipFile(path) as archive:
        graphs = [name for name in archive.namelist() if name.partition("/")[2].startswith("models/")]
        return any(b"quantized_decomposed" in archive.read(name) for name in graphs)


OPERATORS = r"_operator\.(?!attrgetter|methodcaller|call)\w+"
TARGET = re.compile(rf"torch\.ops\.\w+\.\w+(\.\w+)?|{OPERATORS}|math\.\w+|torch\.sym_\w+")
VALUES = (ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Constant, ast.Tuple, ast.expr_context)
ARITHMETIC = (*VALUES, ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop)


def check_program(path: Path) -> None:
    """Refuse a .pt2 file that could execute code: PyTorch's reader unpickles, and evaluates shapes as expressions."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            inside = name.partition("/")[2]
            if inside.startswith("data/sample_inputs/"):
                torch.load(io.BytesIO(archive.read(name)), weights_only=True)  # raises where it would execute code
            elif inside.startswith(("data/weights/", "data/constants/")):
                _check_payload(path, inside, archive.read(name) if inside.endswith("_config.json") else None)
            elif inside.startswith("models/"):
                _check_graph(path, json.loads(archive.read(name)))
            elif inside.startswith("data/") or inside.endswith(".so"):
                raise _executes(path, inside)


def _check_payload(path: Path, name: str, config: bytes | None) -> None:
    if config is None:
        if name.endswith(".pt"):
            raise _executes(path, name)
        return
    for meta in json.loads(config)["config"].values():
        if meta.get("use_pickle") or not meta["path_name"].startswith(("weight_", "tensor_")):
            raise _executes(path, meta["path_name"])


def _check_graph(path: Path, program: Any) -> None:
    """Refuse operations that are none of torch's, and expressions that are more than arithmetic."""
    for key, value in _walk(program):
        if key == "target" and not TARGET.fullmatch(value):
            raise _executes(path, value)
        if key == "expr_str":
            tree = ast.parse(value, mode="eval")
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            named = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
            words = [word for word in (*texts, *named) if isinstance(word, str)]
            plain = all(isinstance(node, ARITHMETIC) for node in ast.walk(tree))
            if not plain or any(not word.isidentifier() or word.startswith("_") for word in words):
                raise _executes(path, value)


def _walk(value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text of a JSON document, with its key."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, str):
            yield str(key), item
        elif isinstance(item, dict | list):
            yield from _walk(item)


def _executes(path: Path, part: str) -> WrongInput:
    advice = "export the plain network again by torch.export.save"
    return WrongInput("model", f"{path} would execute code to be read ({part[:60]}); {advice}")


# ONNX --------------------------------------------------------------------------------------------------------------
FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
WHOLES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8}


class OnnxModel:
    """An ONNX model, as a function from inputs to its outputs by name; ONNX Runtime on one thread of the CPU."""

    def __init__(self, path: Path) -> None:
        require("onnxruntime", "onnx")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has kinds of its own
            reason = _first_line(error)
            if "External data path does not exist" in str(error):
                reason = f"its weights are in a file of their own; keep {path.name}.data beside it"
            raise WrongInput("model", f"{path} cannot be read as an ONNX file: {reason}") from error
        self.inputs = self.session.get_inputs()
        self.outputs = [output.name for output in self.session.get_outputs()]

    def __call__(self, inputs: Any) -> dict[str, Tensor]:
        """Return the numeric outputs by name; a model of a fixed number of rows is asked in parts."""
        feeds = self._feeds(inputs)
        rows, fixed = len(next(iter(feeds.values()))), self.inputs[0].shape[0]
        size = fixed if isinstance(fixed, int) and fixed > 0 else rows
        parts = [self._run(feeds, start, size) for start in range(0, rows, size)]
        joined = {name: np.concatenate([part[name] for part in parts])[:rows] for name in parts[0]}
        return {name: torch.from_numpy(value) for name, value in joined.items()}

    def _run(self, feeds: dict[str, np.ndarray], start: int, size: int) -> dict[str, np.ndarray]:
        """Return the outputs of some rows; missing rows of the last part repeat its last one."""
        part = {name: value[start : start + size] for name, value in feeds.items()}
        short = size - len(next(iter(part.values())))
        padded = {name: np.concatenate([value, np.repeat(value[-1:], short, 0)]) for name, value in part.items()}
        answers = dict(zip(self.outputs, self.session.run(self.outputs, padded), strict=True))
        numeric = {k: v for k, v in answers.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
        if not numeric:
            kinds = ", ".join(type(value).__name__ for value in answers.values())
            raise WrongInput("model", f"its outputs are {kinds}; export it with a tensor of logits or probabilities")
        return numeric

    def _feeds(self, inputs: Any) -> dict[str, np.ndarray]:
        """Return inputs by name, in the types that the model takes."""
        names = [one.name for one in self.inputs]
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        values = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(names, parts, strict=False))
        if set(values) != set(names):
            listed = ", ".join(map(str, values))
            raise WrongInput("inputs", f"{listed} do not fit; the ONNX model takes {', '.join(names)}")
        return {one.name: _as_type(values[one.name], one.type) for one in self.inputs}


def _as_type(value: Tensor, wanted: str) -> np.ndarray:
    kinds = FLOATS if value.is_floating_point() else WHOLES
    if wanted not in kinds:
        raise WrongInput("inputs", f"are {value.dtype}; the ONNX model takes {wanted}")
    return value.detach().cpu().numpy().astype(kinds[wanted])


# Hugging Face ------------------------------------------------------------------------------------------------------
def _load_huggingface(folder: Path) -> nn.Module:
    """Return a classifier of a local folder; its weights are .safetensors, and no code of the folder is run."""
    require("transformers", "hf")
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        files = "config.json and .safetensors; save it by model.save_pretrained(folder)"
        raise WrongInput("model", f"{folder} is no folder of a Hugging Face model with {files}")
    import transformers

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        name = (getattr(config, "architectures", None) or [""])[0]
        kinds = ("ImageClassification", "SequenceClassification")
        kind = next((kind for kind in kinds if name.endswith(kind)), None)
        if kind is None:
            raise WrongInput("model", f"{folder} holds {name or 'no architecture'}; allowed: {', '.join(kinds)}")
        auto = getattr(transformers, f"AutoModelFor{kind}")
        net: nn.Module = auto.from_pretrained(folder, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise WrongInput("model", f"{folder} cannot be read: {_first_line(error)}") from error
    return net.eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
