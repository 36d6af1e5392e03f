"""Everything that reads inputs of others, under many mutated inputs: `python tests/fuzz.py --cases 10000 [TARGET ...]`.

Prints a line for each target: cases, answers, refusals, failures, seconds. A case that failed is in --out and is tried
again by `python tests/fuzz.py TARGET --case NUMBER`. tests/test_fuzz.py runs a few cases of each target.
"""

import argparse
import gzip
import io
import json
import logging
import lzma
import pickle
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch
import yaml
from torch import nn

from mutation import Target, case_of, mutate, mutate_json, mutate_lines, run_cases, try_case
from secateur.errors import WrongInput

DRAW = np.random.default_rng(0)
PIXELS = DRAW.integers(0, 256, (6, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


# Forgers ------------------------------------------------------------------------------------------------------------
def forge_zip(draw, content, other):
    """Mutate one member and pack it again with right checksums, or mutate the archive itself."""
    if draw.random() < 0.2:
        return mutate(draw, content, other)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(list(members))
    if draw.random() < 0.85:
        head = members[name][:128] if draw.random() < 0.5 else members[name]  # an array's header comes first
        members[name] = mutate(draw, head, members[draw.choice(list(members))]) + members[name][len(head) :]
    elif draw.random() < 0.5:
        members[draw.choice(("x", "../x", "labels.npy", "inputs.npy"))] = members.pop(name)
    packed = io.BytesIO()
    kind = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with warnings.catch_warnings(), zipfile.ZipFile(packed, "w", kind) as archive:
        warnings.simplefilter("ignore")
        for name, value in members.items():
            archive.writestr(name, value)
    return packed.getvalue()


def forge_gzip(draw, content, other):
    """Mutate the content and compress it again, or mutate the compressed bytes."""
    if draw.random() < 0.2:
        return mutate(draw, content, other)
    return gzip.compress(mutate(draw, gzip.decompress(content), gzip.decompress(other)), 1, mtime=0)


def forge_xz(draw, content, other):
    """Mutate the lines of an archive and compress them again, mutate the file, or make a bomb."""
    if draw.random() < 0.15:
        return mutate(draw, content, other)
    text, part = lzma.decompress(content), lzma.decompress(other)
    if draw.random() < 0.05:
        part = draw.choice((b"0\n", b"{}\n", b" ", text.splitlines(True)[-1]))
        text += part * (2 ** draw.randrange(12, 24) // len(part))  # no more: the memory of the forger counts too
    else:
        text = mutate_lines(draw, text, part)
    check = draw.choice((lzma.CHECK_CRC32, lzma.CHECK_NONE, lzma.CHECK_SHA256))
    return lzma.compress(text, check=check, preset=draw.choice((0, 0, 0, 9)))


def forge_json(draw, content, other):
    """Mutate a value of one JSON document, or its text."""
    if draw.random() < 0.2:
        return mutate(draw, content, other)
    return json.dumps(mutate_json(draw, json.loads(content))).encode("utf-8", "surrogatepass")


def forge_message(draw, content, other):
    """Mutate a message of the wire format behind its checksum: its body, or its table before that is deflated."""
    if draw.random() < 0.1:
        return mutate(draw, content, other)
    size = int.from_bytes(content[9:13], "little")
    table, rest = content[13 : 13 + size], content[13 + size :]
    if draw.random() < 0.6:
        table = zlib.compress(mutate(draw, zlib.decompress(table), other[13:]), 9)
    else:
        rest = mutate(draw, rest, other)
    length = len(table) if draw.random() < 0.98 else draw.choice((0, 2**31, 2**32 - 1, size + 1))
    body = length.to_bytes(4, "little") + table + rest
    return content[:5] + zlib.crc32(body).to_bytes(4, "little") + body


def forge_tensors(draw, content, other):
    """Mutate the JSON header of a .safetensors file and state its right length, or mutate the file."""
    if draw.random() < 0.3:
        return mutate(draw, content, other)
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    if draw.random() < 0.7:
        changed = json.dumps(mutate_json(draw, header)).encode()
    else:
        changed, rest = json.dumps(header).encode(), mutate(draw, rest, other)[: len(rest)].ljust(len(rest), b"\xff")
    return len(changed).to_bytes(8, "little") + changed + rest


YAML = (b"&a ", b"*a", b"<<: *a", b"- ", b": ", b"!!python/object/apply:os.system ", b"!!binary ", b"!!set ", b"? ")
YAML += (b"!!timestamp ", b"2001-13-45", b"1:30:61", b"|\n", b">-\n", b"~", b"---\n", b"...\n", b"%YAML 9\n", b"\t")
YAML += (
    b"[[[[",
    b"{{{{",
    b"'",
    b'"\\x',
    b"0b2",
    b"!!int ",
    b"!!float ",
    b"!!merge ",
    b"=",
    b".inf",
    b"1e400",
    b"9" * 60,
)


def forge_yaml(draw, content, other):
    """Mutate a run file's text, replace a value, or write aliases, repeated keys and depth."""
    kind = draw.random()
    if kind < 0.4:
        return mutate(draw, content, other, YAML)
    fields = yaml.safe_load(content)
    if kind < 0.8:
        changed = mutate_json(draw, mutate_json(draw, fields))
        return yaml.safe_dump(changed, allow_unicode=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    name = draw.choice(list(fields)).encode()
    deep = draw.choice((b"[", b"{a: ", b"- ", b"? ")) * draw.choice((3, 19, 21, 2000))
    width, depth = draw.choice((2, 9, 30)), draw.choice((2, 5, 9))
    laughs = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]\n" for i in range(1, depth)).encode()
    extra = (name + b": " + deep, content + name + b": 1\n", b"a0: &a0 [x]\n" + laughs, b"<<: &a {<<: *a}\n")
    return draw.choice((content, b"")) + draw.choice(extra)


# Targets ------------------------------------------------------------------------------------------------------------
def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def file_target(name: str, path: Path, seeds: list[bytes], read: Callable[[], object], forge=mutate, share=1) -> Target:
    """Return a target whose input is a file at one path."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def read_file(content: bytes) -> object:
        path.write_bytes(content)
        return read()

    return Target(name, seeds, read_file, forge, share)


def check_dataset(data):
    """Check what every command assumes of a data set."""
    assert len(data.inputs) == len(data.labels) and 0 <= data.train_size <= len(data.inputs)
    assert int(data.labels.min()) >= 0 and int(data.labels.max()) < data.classes


def data_targets(folder: Path) -> list[Target]:
    """Return the readers of users' own data and of saved predictions."""
    from secateur.data.load import load
    from secateur.data.prediction_files import read_predictions
    from secateur.data.scaling import DataForm

    form, rows = DataForm(label="y"), DRAW.dirichlet((1, 1, 1), 6)

    def loads(path):
        return lambda: check_dataset(load(str(path), form=form))

    table = b"a,b,y\n1,red,0\n2.5,blue,1\n-3,red,0\n4,blue,1\n"
    images = [npz(inputs=PIXELS, labels=LABELS), npz(x=rows.astype(np.float32), y=LABELS, train_size=4)]
    images += [npz(inputs=PIXELS[..., None], labels=LABELS, mean=[0.1], std=[0.2], groups=np.array(list("abcabc")))]
    answers = {"probabilities": rows, "labels": LABELS, "membership": LABELS % 2}
    shadows = {"shadow_probabilities": np.stack([rows] * 4), "shadow_membership": np.stack([LABELS % 2] * 4)}
    saved = [npz(**answers), npz(**answers, **shadows), npz(**answers, groups=np.array(list("abcabc")))]
    lines = [b"p0,p1,label,membership,group", b".5,.5,0,1,a", b".25,.75,1,0,b", b"1,0,0,1,a"]
    paths = {name: folder / name for name in ("a.npz", "a.csv", "p.npz", "p.csv", "a.parquet", "p.parquet")}
    targets = [
        file_target("data-npz", paths["a.npz"], images, loads(paths["a.npz"]), forge_zip, 30),
        file_target("data-csv", paths["a.csv"], [table], loads(paths["a.csv"]), share=30),
        file_target(
            "predictions-npz", paths["p.npz"], saved, lambda: read_predictions(paths["p.npz"]), forge_zip, share=30
        ),
        file_target(
            "predictions-csv", paths["p.csv"], [b"\n".join(lines)], lambda: read_predictions(paths["p.csv"]), share=20
        ),
    ]
    return targets + parquet_targets(paths["a.parquet"], paths["p.parquet"], loads)


def parquet_targets(data: Path, predictions: Path, loads) -> list[Target]:
    """Return the readers of parquet files; none without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return []
    from secateur.data.prediction_files import read_predictions

    def parquet(**columns):
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        return file.getvalue()

    tables = [parquet(a=[1.0, 2.5, 3.0], b=["x", "y", "x"], y=[0, 1, 0]), parquet(a=[1, 2], y=["no", "yes"])]
    answers = [parquet(p0=[0.5, 0.25], p1=[0.5, 0.75], label=[0, 1], membership=[1, 0])]
    return [
        file_target("data-parquet", data, tables, loads(data), share=10),
        file_target("predictions-parquet", predictions, answers, lambda: read_predictions(predictions), share=10),
    ]


def idx(array: np.ndarray, kind: int) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def set_targets(folder: Path) -> list[Target]:
    """Return the readers of public data sets, one file of each mutated."""
    from secateur.data.chmnist import CLASSES, TILES
    from secateur.data.load import load

    def of(name, file, seeds, forge=mutate, share=5):
        place = folder / name
        path = place / file
        target = f"{name} {Path(file).name}"
        return file_target(target, path, seeds, lambda: check_dataset(load(name, place, False)), forge, share)

    targets = []
    plain = {"images-idx3-ubyte": idx(PIXELS, 8), "labels-idx1-ubyte": idx(LABELS.astype(np.uint8), 8)}
    for part in ("train", "t10k"):
        for name, content in plain.items():
            _write(folder / "mnist/MNIST/raw" / f"{part}-{name}", content)
    targets.append(of("mnist", "MNIST/raw/train-images-idx3-ubyte", [plain["images-idx3-ubyte"]]))
    targets.append(of("mnist", "MNIST/raw/t10k-labels-idx1-ubyte", [plain["labels-idx1-ubyte"]], share=10))
    writers = np.stack([LABELS, LABELS, LABELS + 10, *[LABELS] * 5], 1).astype(">i4")
    for part in ("train", "test"):
        _write(
            folder / f"qmnist/QMNIST/raw/qmnist-{part}-images-idx3-ubyte.gz", gzip.compress(plain["images-idx3-ubyte"])
        )
        _write(folder / f"qmnist/QMNIST/raw/qmnist-{part}-labels-idx2-int.gz", gzip.compress(idx(writers, 0x0C)))
    labels = [gzip.compress(idx(writers, 0x0C), mtime=0)]
    targets.append(of("qmnist", "QMNIST/raw/qmnist-train-labels-idx2-int.gz", labels, forge_gzip, 10))
    records = np.concatenate([LABELS[:3, None].astype(np.uint8), DRAW.integers(0, 256, (3, 3072), dtype=np.uint8)], 1)
    targets.append(of("cifar10", "cifar-10-batches-bin/data_batch_1.bin", [records.tobytes()], share=10))
    batches = [
        pickle.dumps({b"fine_labels": [0, 1, 99], b"data": records[:, 1:]}, protocol=protocol) for protocol in (0, 2, 4)
    ]
    old = [batch.replace(b"numpy._core", b"numpy.core") for batch in batches[:2]]
    targets.append(of("cifar100", "cifar-100-python/train", [*batches, *old], share=20))
    targets += [_svhn(folder, of), _femnist(folder, of)]
    place = [b'"%d",' % (1 + i) + b",".join(b"%d" % (i >> (j % 3) & 1) for j in range(446)) for i in range(3)]
    targets.append(of("location", "location/bangkok", [b"\n".join(place) + b"\n"], share=10))
    targets.append(of("chmnist", f"{TILES}/{CLASSES[0]}/a.tif", pictures(("TIFF",))))
    return targets


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _svhn(folder: Path, of) -> Target:
    from scipy.io import savemat

    pixels, files = DRAW.integers(0, 256, (32, 32, 3, 2), dtype=np.uint8), []
    for compressed in (False, True):
        file = io.BytesIO()
        savemat(file, {"X": pixels, "y": np.array([[1], [10]])}, do_compression=compressed)
        files.append(file.getvalue())
    _write(folder / "svhn/test_32x32.mat", files[0])

    def forge(draw, content, other):
        """Mutate the headers more often than the pixels."""
        size = draw.choice((200, 260, len(content)))
        return mutate(draw, content[:size], other) + content[size:]

    return of("svhn", "train_32x32.mat", files, forge, 20)


def _femnist(folder: Path, of) -> Target:
    users = {f"u{i}": {"x": [[0.5] * 784, [1.0] * 784], "y": [i, 61]} for i in range(2)}
    file = {"users": list(users), "num_samples": [2, 2], "user_data": users}
    content = json.dumps(file).encode()
    _write(folder / "femnist/femnist/data/test/a.json", content)
    return of("femnist", "femnist/data/train/a.json", [content], forge_json, 5)


def pictures(formats):
    from PIL import Image

    files = []
    for form in formats:
        for mode in ("L", "RGB"):
            file = io.BytesIO()
            Image.fromarray(PIXELS[0]).convert(mode).save(file, form)
            files.append(file.getvalue())
    return files


def image_target(folder: Path) -> Target:
    from secateur.data.load import FORMATS, load

    seeds = pictures(FORMATS)
    _write(folder / "images/cat/a.png", seeds[0])
    read = lambda: check_dataset(load(str(folder / "images")))  # noqa: E731
    return file_target("images", folder / "images/dog/b.png", seeds, read, share=20)


def wire_targets() -> list[Target]:
    """Return the decoders of updates and of masks."""
    from secateur.wire import decode, decode_mask, encode, encode_mask

    draw = torch.Generator().manual_seed(0)
    whole = {"conv.weight": torch.randn(4, 3, 3, 3, generator=draw), "conv.bias": torch.randn(4, generator=draw)}
    whole |= {"steps": torch.tensor(7), "fc.weight": torch.randn(40, 50, generator=draw)}
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    thin = {name: value * (torch.rand(value.shape, generator=draw) < 0.1) for name, value in whole.items()}
    updates = [encode(whole), encode(thin), encode({name: value.half() for name, value in thin.items()})]
    updates.append(
        encode({name: value * (torch.rand(value.shape, generator=draw) < 0.4) for name, value in whole.items()})
    )
    masks = [
        encode_mask({name: value != 0 for name, value in thin.items()}),
        encode_mask({"conv.bias": whole["conv.bias"] > 0}),
    ]

    def read_update(content):
        update = decode(content, shapes)
        assert {name: tuple(value.shape) for name, value in update.items()} == shapes

    def read_mask(content):
        assert all(value.dtype == torch.bool for value in decode_mask(content, shapes).values())

    wire = Target("wire updates", updates, read_update, forge_message, 500)
    return [wire, Target("wire masks", masks, read_mask, forge_message, 150)]


RUNS = {
    "audit": "model: digits-cnn\ndata: digits\npruner: l1-unstructured, l1-structured\nsparsity: [.5, .7]\n"
    "attack: conf, samia\ndefense: [none, ppb]\nseeds: 2\ntrain: {epochs: 3, learning_rate: .01}\nlimits: {auc: .6}\n",
    "invert": "model: lenet-zhu\nattack: 'ig:iterations=10'\ndefense: [none, 'dgp:k1=.05:k2=.75']\ntargets: 3\n"
    "batch_size: 2\nseeds: [0, 3]\nlabels: oracle\n",
    "federate": "rounds: 3\nclients: 4\nper_round: 2\nbase_pruning: [random, prunefl]\ndefense: pseudo-largest\n"
    "faults: {drop_out: .1}\nattack: ig\nattack_every: 2\npartition: iid\n",
    "sweep": "jobs:\n  one: {job: audit, grid: {sparsity: [.5, .7]}, seeds: 2}\n  two: {job: invert, targets: 2}\n",
    "recommend": "model: digits-cnn\npruner: l1-unstructured, l1-structured+int8\nsparsity: [.5, .9]\nepochs: [2, 4]\n"
    "defense: [basic, 'ppb:strength=4']\nlearning_rate: .001, .01\nmax_auc: .6\nlimits: {accuracy_drop: .05}\n"
    "budget: 2h\nfinalists: 2\nattack: conf\n",
    "prune": "model: digits-cnn\ndata: digits\npruner: l1-unstructured\nsparsity: .5\ndefense: ppb\nremove: false\n"
    "finetune: {epochs: 3}\nseed: 1\n",
    "reproduce": "study: matrix\nscale: tiny\ndata: mnist\nseeds: 2\nset: {rows: none, rounds: 4, threads: 1}\n",
    "policy": "schema: 1\nname: release\nset_on: 2026-11-01\nlimits: {auc: .6, decide: high}\nclaim: {epsilon: 3}\n",
}


def yaml_targets(folder: Path) -> list[Target]:
    """Return the readers of run files, policies and overrides."""
    from secateur.catalogue import find
    from secateur.config import Audit, Federate, Invert, PolicyFile, Prune, Recommend, Reproduce, Sweep, read
    from secateur.studies.matrix import _read
    from secateur.studies.study import Request

    kinds = {"audit": Audit, "invert": Invert, "federate": Federate, "sweep": Sweep, "policy": PolicyFile}
    kinds |= {"recommend": Recommend, "prune": Prune, "reproduce": Reproduce}
    targets = []
    for name, kind in kinds.items():
        path = folder / f"{name}.yaml"
        read_file = lambda kind=kind, path=path: read(kind, path, {})  # noqa: E731
        targets.append(file_target(f"{name}.yaml", path, [RUNS[name].encode()], read_file, forge_yaml, 40))
    texts = [b"train.epochs=3", b"sparsity=[.5, .7]", b"limits.auc=.6", b"seeds=2", b"attack=conf,lira:queries=2"]

    def override(content):
        read(Audit, None, {}, [content.decode("utf-8", "replace")])

    fields = [b"rows=none", b"members=200", b"iterations=30", b"sparsity=.5", b"measures=inversion", b"rounds=12"]

    def override_matrix(content):
        request = Request("matrix", "tiny", {}, [content.decode("utf-8", "replace")], folder)
        _read(find("study", "matrix").make(), request)

    forge = lambda d, c, o: mutate(d, c, o, YAML)  # noqa: E731
    targets.append(Target("overrides", texts, override, forge, 60))
    return [*targets, Target("overrides of the matrix", fields, override_matrix, forge, 10)]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def model_targets(folder: Path, long: bool) -> list[Target]:
    """Return the readers of weights, networks, captured updates and artifacts; without `long` no compiled networks."""
    from safetensors.torch import save

    from secateur.evaluation.update_files import read_update
    from secateur.models.create import load_weights
    from secateur.runs.artifacts import Result, decode, encode

    net = network()
    plain = {name: value.clone() for name, value in net.state_dict().items()}
    states = [save(plain), save({f"module.{name}": value for name, value in plain.items()})]
    states.append(save(plain, {"secateur": json.dumps({"config": {"remove": True, "pruner": "l1-structured"}})}))
    gradient = {name: torch.randn(value.shape) for name, value in net.named_parameters()}
    updates = [save(gradient, {"kind": "gradient"}), save(gradient), save(plain, {"kind": "weights"})]
    saved = io.BytesIO()
    torch.save(plain, saved)
    artifact = encode(Result({"weight": torch.ones(3, 2)}, {"epochs": 3}), "a" * 64)
    files = {end: folder / f"model.{end}" for end in ("safetensors", "pt", "update.safetensors")}

    def weights(end):
        return lambda: load_weights(network(), files[end])

    def update():
        read_update(files["update.safetensors"], network(), weights=False)

    targets = [
        file_target("weights .safetensors", files["safetensors"], states, weights("safetensors"), forge_tensors, 20),
        file_target("updates", files["update.safetensors"], updates, update, forge_tensors, 20),
        file_target("weights .pt", files["pt"], [saved.getvalue()], weights("pt"), forge_zip, 10),
        Target("artifacts", [artifact], lambda content: decode(content, "a" * 64), forge_tensors, 40),
    ]
    return [*targets, *program_targets(folder, net), *onnx_target(folder, net)] if long else targets


def program_targets(folder: Path, net: nn.Module) -> list[Target]:
    """Return the readers of TorchScript and of exported programs."""
    from secateur.models.formats import load_model

    scripted, program = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(net), scripted)
        torch.export.save(torch.export.export(net, (torch.zeros(2, 6),)), program)
    contents = {"script.pt": scripted.getvalue(), "pt2": program.getvalue()}
    return [
        file_target(f"model .{end}", path, [content], lambda path=path: load_model(path), forge_zip, 2)
        for end, content in contents.items()
        for path in (folder / f"model.{end}",)
    ]


def onnx_target(folder: Path, net: nn.Module) -> list[Target]:
    try:
        import onnxruntime  # noqa: F401

        path = folder / "source.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(net, (torch.zeros(2, 6),), path, dynamo=True, verbose=False)
    except ImportError:
        return []
    from secateur.models.formats import load_model

    file = folder / "model.onnx"
    return [file_target("model .onnx", file, [path.read_bytes()], lambda: load_model(file), share=5)]


SMALL = {
    "audit": "audit --shadows 2 --sparsity .5 --set train.epochs=1 --set finetune.epochs=1",
    "invert": "invert --attack ig:iterations=5 --targets 2 --defense none,dgp",
    "federate": "federate --model lenet-zhu --rounds 4 --clients 4 --per-round 2 --batch-size 4"
    " --base-pruning prunefl --attack ig:iterations=5 --attack-every 2 --membership yeom",
    "submodels": "federate --submodels fdropout,local --rounds 3 --clients 4 --partition iid --batch-size 32"
    " --attack yeom --evaluate-every 2 --set examples=200",
    "recommend": "recommend --model mlp --pruner l1-unstructured --sparsity .5,.9 --defense basic,ppb --shadows 1"
    " --candidates 3 --finalists 2 --attack conf --set train.epochs=2 --set finetune.epochs=1 --set examples=300",
}
READ = ("results.jsonl", "groups.jsonl", "figures.jsonl", "config.yaml", "run.json")


def run_folders(folder: Path) -> list[bytes]:
    """Return small runs of every kind, each as one JSON of its files; they are made once."""
    from secateur.cli import main

    bundles = []
    for name, arguments in SMALL.items():
        place = folder / name
        if not (place / "report.html").exists():
            assert main([*arguments.split(), "--out", str(place)]) == 0
        bundles.append(json.dumps({name: (place / name).read_text() for name in READ if (place / name).exists()}))
    return [bundle.encode() for bundle in bundles]


def folder_targets(folder: Path, bundles: list[bytes]) -> list[Target]:
    """Return the readers of run folders: the page with the evidence pack of audits, and the gate's decision."""
    from secateur.config import PolicyFile, read
    from secateur.evaluation import gate, limits
    from secateur.report.evidence import write_pack
    from secateur.report.page import write_page
    from secateur.runs.archive import gather_runs, write_archive
    from secateur.runs.folder import explain_damage, load_rows

    policy = folder / "gate.yaml"
    policy.write_text(RUNS["policy"])
    rules = read(PolicyFile, policy, {})

    def forge(draw: Random, content: bytes, other: bytes) -> bytes:
        files = json.loads(content)
        name = draw.choice([name for name in files for _ in range(3 if name.endswith("jsonl") else 1)])
        text, part = files[name].encode(), json.loads(other).get(name, "").encode()
        if name == "config.yaml":
            changed = mutate(draw, text, part, YAML)
        else:
            changed = mutate_lines(draw, text, part) if name.endswith("jsonl") else forge_json(draw, text, part or text)
        return json.dumps(files | {name: changed.decode("latin1")}).encode()

    def unpack(content: bytes, place: Path) -> Path:
        place.mkdir(parents=True, exist_ok=True)
        for name in READ:
            (place / name).unlink(missing_ok=True)
        for name, text in json.loads(content).items():
            (place / name).write_bytes(text.encode("latin1", "replace"))
        return place

    whole = unpack(bundles[0], folder / "whole")

    def decide(content: bytes) -> None:
        """Hold a forged run against a policy, and against the run before it was forged, in both directions."""
        place = unpack(content, folder / "forged")
        for now, before in ((place, whole), (whole, place)):
            with explain_damage([place]):
                decision = gate.decide({"run": load_rows(now)}, rules, load_rows(before))
                gate.render_markdown(decision), gate.sarif(decision, "1"), limits.junit(decision.checks["run"])

    def read_folder(content: bytes) -> None:
        place = unpack(content, folder / "forged")
        refused = []
        for act in (lambda: write_page([place]), lambda: write_pack(place, ["md", "json"], None)):
            try:
                with explain_damage([place]):
                    act()
            except WrongInput as error:
                refused.append(error)
        if len(refused) == 2:
            raise refused[0]

    def archive(content: bytes) -> None:
        """Archive the rows of a forged run together with those of the run before it was forged."""
        place = unpack(content, folder / "forged")
        with explain_damage([place]):
            gathered = gather_runs([place, whole], ["samia-fig6"], "abc1234")
            write_archive(folder / "joined.jsonl.xz", gathered.rows, gathered.provenance, gathered.figures)

    return [
        Target("run folders", bundles, read_folder, forge, 2),
        Target("gate", bundles, decide, forge, 10),
        Target("archived runs", bundles, archive, forge, 2),
        *archive_targets(folder, whole),
    ]


def archive_targets(folder: Path, run: Path) -> list[Target]:
    """Return the readers of archives of rows: joined with another and tabulated, and as a page."""
    from secateur.report.page import write_page
    from secateur.runs.archive import gather_runs, read_archive, write_archive
    from secateur.runs.folder import explain_damage
    from secateur.studies.study import tabulate_archive

    place, good = folder / "forged.jsonl.xz", folder / "good.jsonl.xz"
    gathered = gather_runs([run], ["samia-fig6"], "abc1234")
    write_archive(good, gathered.rows, gathered.provenance, gathered.figures)
    real = Path(__file__).parents[1] / "results/rows"
    seeds = [
        path.read_bytes() for path in (good, real / "matrix-int8.jsonl.xz", real / "samia-table1-cifar10.jsonl.xz")
    ]

    def tabulate() -> None:
        with explain_damage([place]):
            joined = gather_runs([good, place])
            write_archive(folder / "joined.jsonl.xz", joined.rows, joined.provenance, joined.figures)
            for table in tabulate_archive(read_archive(place)):
                table.markdown()

    def show() -> None:
        with explain_damage([place]):
            write_page([place], folder / "page.html")

    return [
        file_target("archives", place, seeds, tabulate, forge_xz, 2),
        file_target("archives as a page", place, seeds, show, forge_xz, 1),
    ]


def flower_targets() -> list[Target]:
    """Return the readers of clients' replies and of servers' tasks; none without Flower."""
    try:
        from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
        from flwr.serverapp.strategy import FedAvg
    except ImportError:
        return []
    sys.path.insert(0, str(Path(__file__).parent / "federated/flower"))
    import talking

    from secateur.catalogue import methods
    from secateur.config import Federate, read
    from secateur.federated.flower import DecodingStrategy
    from secateur.federated.flower.app import restrict_task, task_of
    from secateur.federated.flower.link import WIRE, _parse_greeting, arrays_of
    from secateur.wire import encode

    sent = {"w": torch.arange(50.0).reshape(5, 10), "b": torch.ones(5)}

    class Nodes:
        def get_node_ids(self):
            return [7, 8]

    strategy = DecodingStrategy(FedAvg())
    list(strategy.configure_train(1, arrays_of(sent), ConfigRecord(), Nodes()))
    asked = talking.asked(sent)
    update = encode({name: 0.1 * value for name, value in sent.items()})
    good = {
        "arrays": {"update": ["uint8", [len(update)], WIRE, update.decode("latin1")]},
        "metrics": {"num-examples": 3},
    }

    def reply_of(description):
        """Build a message, whatever Flower's own types let through."""
        try:
            arrays = {
                str(name): Array(kind, tuple(shape), stype, data.encode("latin1"))
                for name, (kind, shape, stype, data) in description["arrays"].items()
            }
            content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(description["metrics"])})
            return Message(content, reply_to=asked)
        except Exception as error:  # a message that cannot exist
            raise WrongInput("message", f"Flower refuses it: {type(error).__name__}") from None

    def forge(draw, content, other):
        description = json.loads(content)
        if draw.random() < 0.6:
            entry = description["arrays"]["update"]
            entry[3] = forge_message(draw, entry[3].encode("latin1"), update).decode("latin1")
        else:
            description = mutate_json(draw, description)
        return json.dumps(description).encode()

    def read_reply(content):
        """Average a forged reply with an honest one: the round must end, and be finite."""
        replies = [reply_of(json.loads(content)), reply_of(good)]
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None and all(np.isfinite(array.numpy()).all() for array in arrays.values())

    config = read(Federate, None, {"rounds": 2, "clients": 2})
    task = json.loads(task_of(config, 0, config.base_pruning[0], config.defense[0]))["config"]

    def read_task(content):
        try:
            task = json.loads(content)
        except ValueError:
            raise WrongInput("message", "is no JSON") from None
        fields = restrict_task(task, (), False)
        assert fields["data"] in methods("dataset") and fields["model"] in methods("model")
        read(Federate, None, fields)

    def read_greeting(content):
        try:
            answer = RecordDict({"turn": ConfigRecord(json.loads(content))})
        except (TypeError, ValueError, AttributeError):
            raise WrongInput("message", "Flower refuses it") from None
        client, examples = _parse_greeting(answer) or (0, 0)
        assert isinstance(client, int) and 0 <= examples <= 2**32

    hello = [json.dumps({"client": 1, "examples": 300}).encode()]
    return [
        Target("Flower replies", [json.dumps(good).encode()], read_reply, forge, 60),
        Target("Flower tasks", [json.dumps(task).encode()], read_task, forge_json, 20),
        Target("Flower greetings", hello, read_greeting, forge_json, 20),
    ]


def build_targets(folder: Path, bundles: list[bytes] | None = None) -> list[Target]:
    """Return all targets; their files lie in the folder.

    With `bundles`, run folders as `run_folders` returns them, targets that take seconds to prepare are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = [*wire_targets(), *yaml_targets(folder), *data_targets(folder), *set_targets(folder / "sets")]
    targets += [image_target(folder), *model_targets(folder, bundles is None), *flower_targets()]
    return [*targets, *folder_targets(folder, bundles or run_folders(folder / "runs"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help="parts of names of targets; by default all")
    parser.add_argument("--cases", type=int, default=10_000, help="in all, by the targets' shares")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="try one case again, with its traceback")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "secateur-fuzz")
    parser.add_argument("--out", default="fuzz.jsonl", help="failures, a line each")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    targets = build_targets(options.folder)
    chosen = [t for t in targets if not options.targets or any(part in t.name for part in options.targets)]
    if options.case is not None:
        print(try_case(chosen[0], case_of(chosen[0], options.seed, options.case)))
        return
    shares = sum(target.share for target in chosen)
    for target in chosen:
        start = time.perf_counter()
        counts = run_cases(target, options.seed, 0, -(-options.cases * target.share // shares), options.out)
        failed = counts["cases"] - counts["read"] - counts["refused"]
        words = f"{counts['cases']} cases, {counts['read']} read, {counts['refused']} refused, {failed} failed"
        print(f"{target.name}: {words}, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
