"""Every loader on small files in the layout of its public distribution."""

import dataclasses
import gzip
import io
import json
import pickle
import tarfile
import zipfile
from hashlib import md5

import numpy as np
import pytest
import torch

from secateur.catalogue import methods
from secateur.data import cifar
from secateur.data.load import load
from secateur.errors import WrongInput


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path, monkeypatch):
    monkeypatch.delenv("SECATEUR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def read(name, folder):
    return load(name, folder, download=False)


def tgz(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def unpacked(folder, members):
    for name, data in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def pixels_of(data):
    """The bytes that were in the file."""
    shape = (1, -1, 1, 1)
    values = (data.inputs * torch.tensor(data.std).view(shape) + torch.tensor(data.mean).view(shape)) * 255
    return values.round().to(torch.uint8).numpy()


def test_the_catalogue_says_what_each_is():
    known = methods("dataset")
    pictures = ["chmnist", "cifar10", "cifar100", "digits", "fashion-mnist", "femnist", "mnist", "qmnist", "svhn"]
    assert list(known) == sorted([*pictures, "breast_cancer", "location", "purchase", "texas"])
    for entry in known.values():
        row = entry.describe()
        assert row["defaults"] == {"folder": None, "download": True}
        assert row["source"] == "embedded" or row["source"].startswith("http")
        assert row["summary"].endswith((".", ")"))
        json.dumps(row)


def test_embedded():
    digits = load("digits")
    assert (digits.inputs.shape, digits.classes, digits.verified) == ((1797, 1, 8, 8), 10, True)
    assert abs(digits.inputs.mean()) < 1e-3
    assert abs(digits.inputs.std() - 1) < 1e-3
    cancer = load("breast_cancer")
    assert (cancer.inputs.shape, cancer.classes) == ((569, 30), 2)
    assert cancer.inputs.mean(0).abs().max() < 1e-5
    assert (cancer.inputs.std(0, correction=0) - 1).abs().max() < 1e-5


def cifar_batches(draw, classes, names):
    return {name: (draw.integers(0, 256, (6, 3072), dtype=np.uint8), draw.integers(0, classes, 6)) for name in names}


def binary(batches, prefix, coarse):
    def record(pixels, label):
        return (b"\x13" if coarse else b"") + bytes([label]) + pixels.tobytes()

    return {f"{prefix}/{name}.bin": b"".join(map(record, *batch)) for name, batch in batches.items()}


def python(batches, prefix, key):
    members = {f"{prefix}/batches.meta": b"anything at all"}
    for name, (pixels, labels) in batches.items():
        content = {b"data": pixels, key.encode(): labels.tolist(), b"filenames": [b"a.png"] * 6}
        members[f"{prefix}/{name}"] = pickle.dumps(content, protocol=2)
    return members


@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, draw, name, version, packed):
    tenfold = name == "cifar10"
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if tenfold else ["train", "test"]
    batches = cifar_batches(draw, 10 if tenfold else 100, names)
    if version == "binary":
        members = binary(batches, "cifar-10-batches-bin" if tenfold else "cifar-100-binary", not tenfold)
    else:
        prefix, key = ("cifar-10-batches-py", "labels") if tenfold else ("cifar-100-python", "fine_labels")
        members = python(batches, prefix, key)
    if packed:
        tgz(tmp_path / f"cifar-{10 if tenfold else 100}-{version}.tar.gz", dict(reversed(members.items())))
    else:
        unpacked(tmp_path, members)
    data = read(name, tmp_path)
    assert data.train_size == len(data.labels) - 6 == 6 * (len(names) - 1)
    assert np.array_equal(pixels_of(data).reshape(-1, 3072), np.concatenate([batches[n][0] for n in names]))
    assert data.labels.tolist() == [int(label) for n in names for label in batches[n][1]]
    assert not data.verified


def test_cifar_from_some_batches_and_its_own_folder(tmp_path, draw):
    batches = cifar_batches(draw, 10, ["data_batch_3", "test_batch"])
    unpacked(tmp_path, binary(batches, "cifar-10-batches-bin", False))
    for folder in (tmp_path, tmp_path / "cifar-10-batches-bin"):
        data = read("cifar10", folder)
        assert (data.train_size, len(data.labels)) == (6, 12)


def test_cifar_is_verified_when_every_batch_has_its_checksum(tmp_path, draw, monkeypatch):
    batches = cifar_batches(draw, 100, ["train", "test"])
    members = binary(batches, "cifar-100-binary", True)
    sums = [md5(data).hexdigest() for data in members.values()]
    unpacked(tmp_path, members)
    for train, test, verified in ((sums[0], sums[1], True), (sums[0], "0", False)):
        changed = {"train": {"train.bin": train, "train": "0"}, "test": {"test.bin": test, "test": "0"}}
        monkeypatch.setattr(cifar, "CIFAR100", dataclasses.replace(cifar.CIFAR100, **changed))
        assert read("cifar100", tmp_path).verified is verified
    (tmp_path / "cifar-100-binary/test.bin").unlink()
    assert not read("cifar100", tmp_path).verified  # whole files, and not all of them


def test_cifar_damage(tmp_path, draw):
    file = tmp_path / "cifar-10-batches-bin/data_batch_1.bin"
    unpacked(tmp_path, binary(cifar_batches(draw, 10, ["data_batch_1"]), "cifar-10-batches-bin", False))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(WrongInput, match="truncated"):
        read("cifar10", tmp_path)
    file.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(WrongInput, match=r"labels from .* to 10; allowed: 0 to 9"):
        read("cifar10", tmp_path)
    file.rename(file.with_name("other.bin"))
    with pytest.raises(WrongInput, match="no training batch"):
        read("cifar10", tmp_path)


def test_cifar_with_a_payload(tmp_path):
    class Payload:
        def __reduce__(self):
            return open, (str(tmp_path / "ran"), "w")

    tgz(tmp_path / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": pickle.dumps({"data": Payload()}, 2)})
    with pytest.raises(WrongInput, match="not a safe pickle"):
        read("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_cifar_pickles_of_the_wrong_shape(tmp_path):
    pixels = np.zeros((2, 3072), np.uint8)
    for content in (
        {},
        {"data": 1, "labels": 2},
        {"data": pixels[:, :5], "labels": [1, 2]},
        {"data": [[300] * 3072] * 2, "labels": [1, 2]},
        {"data": pixels, "labels": [[1], [1, 2]]},
        {"data": pixels, "labels": [1, 2, 3]},
    ):
        unpacked(tmp_path, {"cifar-10-batches-py/data_batch_1": pickle.dumps(content, 2)})
        with pytest.raises(WrongInput, match=r"3072 pixels and a label|truncated, damaged"):
            read("cifar10", tmp_path)


def idx(array):
    kind = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    sizes = np.array(array.shape, dtype=">u4").tobytes()
    return bytes([0, 0, kind, array.ndim]) + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def idx_files(draw, folder, names, rows=(5, 3), plain=False):
    arrays = []
    for i, name in enumerate(names):
        count = rows[i // 2]
        if "images" in name:
            array = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        elif name.endswith("int"):
            array = np.stack(
                [draw.integers(0, 10, count), np.zeros(count), np.arange(count) + 100 * i] + [np.zeros(count)] * 5, 1
            )
            array = array.astype(np.int32)
        else:
            array = draw.integers(0, 10, count, dtype=np.uint8)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / (name if plain else f"{name}.gz")).write_bytes(idx(array) if plain else gzip.compress(idx(array)))
        arrays.append(array)
    return arrays


MNIST = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
QMNIST = [
    "qmnist-train-images-idx3-ubyte",
    "qmnist-train-labels-idx2-int",
    "qmnist-test-images-idx3-ubyte",
    "qmnist-test-labels-idx2-int",
]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_and_fashion(tmp_path, draw, name, folder, plain):
    arrays = idx_files(draw, tmp_path / folder / "raw", MNIST, plain=plain)
    data = read(name, tmp_path)
    assert (data.train_size, data.input_shape, data.writers) == (5, (1, 28, 28), None)
    assert np.array_equal(pixels_of(data)[:, 0], np.concatenate([arrays[0], arrays[2]]))
    assert data.labels.tolist() == [*arrays[1], *arrays[3]]
    assert not data.verified
    (tmp_path / folder / "raw" / (MNIST[3] + ("" if plain else ".gz"))).unlink()
    with pytest.raises(WrongInput, match=r"t10k-labels.*downloads are turned off; get it from http"):
        read(name, tmp_path)


def test_qmnist_with_its_own_images(tmp_path, draw):
    arrays = idx_files(draw, tmp_path / "QMNIST/raw", QMNIST)
    data = read("qmnist", tmp_path)
    assert data.writers.tolist() == [100, 101, 102, 103, 104, 300, 301, 302]
    assert data.labels.tolist() == [*arrays[1][:, 0], *arrays[3][:, 0]]
    assert data.verified is False


def test_qmnist_unpacked_has_no_published_checksum(tmp_path, draw):
    idx_files(draw, tmp_path / "QMNIST/raw", QMNIST, plain=True)
    assert read("qmnist", tmp_path).verified is None


def test_qmnist_labels_beside_mnist_images(tmp_path, draw):
    images = idx_files(draw, tmp_path / "MNIST/raw", MNIST, rows=(5, 2))
    labels = idx_files(draw, tmp_path / "QMNIST/raw", QMNIST, rows=(5, 6))
    for name in (QMNIST[0], QMNIST[2]):
        (tmp_path / "QMNIST/raw" / f"{name}.gz").unlink()
    data = read("qmnist", tmp_path)
    assert np.array_equal(pixels_of(data)[:, 0], np.concatenate([images[0], images[2]]))
    assert data.labels.tolist() == [*labels[1][:, 0], *labels[3][:2, 0]]  # MNIST's test images come first in QMNIST's


def test_idx_files_that_do_not_fit(tmp_path, draw):
    folder = tmp_path / "MNIST/raw"
    idx_files(draw, folder, MNIST)
    (folder / f"{MNIST[1]}.gz").write_bytes(gzip.compress(idx(np.zeros(4, dtype=np.uint8))))
    with pytest.raises(WrongInput, match=r"shape \(4,\) for 5 images"):
        read("mnist", tmp_path)
    (folder / f"{MNIST[1]}.gz").write_bytes(gzip.compress(idx(np.full(5, 10, dtype=np.uint8))))
    with pytest.raises(WrongInput, match="labels from"):
        read("mnist", tmp_path)
    (folder / f"{MNIST[0]}.gz").write_bytes(gzip.compress(idx(np.zeros((5, 28, 27), dtype=np.uint8))))
    with pytest.raises(WrongInput, match="images are bytes of shape"):
        read("mnist", tmp_path)


def leaf(users):
    data = {name: {"x": [[level] * 784 for level in levels], "y": labels} for name, (levels, labels) in users.items()}
    return json.dumps(
        {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    ).encode()


def test_femnist(tmp_path):
    members = {
        "femnist/data/train/all_data_0.json": leaf({"f_b": ([1.0, 0.0], [3, 61])}),
        "femnist/data/train/all_data_1.json": leaf({"f_a": ([0.5], [7])}),
        "femnist/data/test/all_data_0.json": leaf({"f_c": ([0.25], [0])}),
    }
    unpacked(tmp_path, members)
    for folder in (tmp_path, tmp_path / "femnist", tmp_path / "femnist/data"):
        data = read("femnist", folder)
        assert (data.classes, data.train_size, data.input_shape) == (62, 3, (1, 28, 28))
        assert data.labels.tolist() == [3, 61, 7, 0]
        assert data.writers.tolist() == [1, 1, 0, 2]
        assert data.inputs[:, 0, 0, 0].tolist() == pytest.approx(
            [(x - 0.9652) / 0.1559 for x in (1, 0, 0.5, 0.25)], abs=1e-5
        )


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"user_data": {"a": {"x": [[1.0]], "y": [1]}}}', b"[" * 100_000, b"\xff"]
)
def test_femnist_damage(tmp_path, content):
    unpacked(tmp_path, {"femnist/data/train/x.json": content})
    with pytest.raises(WrongInput, match="not a file of LEAF's"):
        read("femnist", tmp_path)


def test_femnist_is_made_with_leaf(tmp_path):
    with pytest.raises(WrongInput, match=r"make it with https://github\.com/TalwalkarLab/leaf and put"):
        read("femnist", tmp_path)


def svhn_files(folder, draw, labels=(10, 1, 9, 5)):
    from scipy.io import savemat

    images = draw.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)  # rows, then height, width, colour
    for name, rows in (("train", slice(0, 3)), ("test", slice(3, 4))):
        content = {"X": images[rows].transpose(1, 2, 3, 0), "y": np.array(labels[rows], dtype=np.uint8)[:, None]}
        savemat(folder / f"{name}_32x32.mat", content, do_compression=True)
    return images


def test_svhn(tmp_path, draw):
    images = svhn_files(tmp_path, draw)
    data = read("svhn", tmp_path)
    assert data.labels.tolist() == [0, 1, 9, 5]
    assert (data.train_size, data.mean, data.std) == (3, (0.5,) * 3, (0.5,) * 3)
    assert np.array_equal(pixels_of(data), images.transpose(0, 3, 1, 2))
    assert data.inputs.is_contiguous()


def test_svhn_damage(tmp_path, draw):
    from scipy.io import savemat

    svhn_files(tmp_path, draw)
    file = tmp_path / "train_32x32.mat"
    whole = file.read_bytes()
    for content in (whole[:-2000], whole[:100], b""):
        file.write_bytes(content)
        with pytest.raises(WrongInput, match="not SVHN's cropped format"):
            read("svhn", tmp_path)
    savemat(file, {"X": np.zeros((32, 32, 3, 6000), dtype=np.uint8), "y": np.zeros((6000, 1))}, do_compression=True)
    with pytest.raises(WrongInput, match="far more"):
        read("svhn", tmp_path)
    savemat(file, {"X": np.zeros((16, 16, 3, 2), dtype=np.uint8), "y": np.zeros((2, 1))})
    with pytest.raises(WrongInput, match="must be"):
        read("svhn", tmp_path)


def tif(colour, size=150):
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(out, "TIFF")
    return out.getvalue()


def chmnist_members():
    prefix = "Kather_texture_2016_image_tiles_5000"
    return {
        f"{prefix}/08_EMPTY/b.tif": tif((9, 8, 7)),
        f"{prefix}/01_TUMOR/10009_CRC-Prim-HE-03_009.tif_Row_301_Col_151.tif": tif((200, 100, 50)),
        f"{prefix}/08_EMPTY/a.tif": tif((1, 2, 3)),
        f"{prefix}/README.txt": b"text",
    }


@pytest.mark.parametrize("packed", [True, False])
def test_chmnist(tmp_path, packed):
    if packed:
        with zipfile.ZipFile(
            tmp_path / "Kather_texture_2016_image_tiles_5000.zip", "w", zipfile.ZIP_DEFLATED
        ) as archive:
            for name, data in chmnist_members().items():
                archive.writestr(name, data)
    else:
        unpacked(tmp_path, chmnist_members())
    data = read("chmnist", tmp_path)
    assert (data.classes, data.labels.tolist(), data.input_shape) == (8, [0, 7, 7], (3, 32, 32))
    assert pixels_of(data)[:, :, 5, 5].tolist() == [[200, 100, 50], [1, 2, 3], [9, 8, 7]]
    assert data.inputs[0, 0, 0, 0].item() == pytest.approx((200 / 255 - 0.485) / 0.229, abs=1e-5)


def test_chmnist_damage(tmp_path):
    name = "Kather_texture_2016_image_tiles_5000/01_TUMOR/x.tif"
    unpacked(tmp_path, {name: tif((1, 2, 3))[:5000]})
    with pytest.raises(WrongInput, match=r"x\.tif is not a readable picture"):
        read("chmnist", tmp_path)
    unpacked(tmp_path, {name: tif((1, 2, 3)), name.replace("01_TUMOR", "09_MORE"): tif((1, 2, 3))})
    with pytest.raises(WrongInput, match="outside the class folders"):
        read("chmnist", tmp_path)


def csv(bits, labels=None, quote=""):
    rows = [",".join(map(str, row)) for row in bits]
    if labels is not None:
        rows = [f"{quote}{label}{quote},{row}" for label, row in zip(labels, rows, strict=True)]
    return "".join(f"{row}\n" for row in rows).encode()


TABLES = [("location", "bangkok", 446, [30, 1, 7], '"'), ("purchase", "dataset_purchase", 600, [100, 1, 7], "")]


@pytest.mark.parametrize(("name", "member", "features", "labels", "quote"), TABLES)
def test_location_and_purchase(tmp_path, draw, name, member, features, labels, quote):
    bits = draw.integers(0, 2, (3, features))
    text = csv(bits, labels, quote)
    tgz(tmp_path / "in/tgz" / f"dataset_{name}.tgz", {member: text})
    tgz(tmp_path / "in/sub" / name / f"dataset_{name}.tgz", {f"./{member}": text})
    unpacked(tmp_path / "in/plain", {member: text})
    for folder in ("tgz", "sub", "plain"):
        data = read(name, tmp_path / "in" / folder)
        assert np.array_equal(data.inputs.numpy(), bits)
        assert data.labels.tolist() == [label - 1 for label in labels]
        assert (data.train_size, data.mean, data.writers) == (3, (), None)


def test_texas(tmp_path, draw):
    bits, labels = draw.integers(0, 2, (3, 6169)), b"100\n1\n7\n"
    members = {"texas/100/feats": csv(bits), "texas/100/feats_names": b"x", "texas/100/labels": labels}
    tgz(tmp_path / "packed/dataset_texas.tgz", members)
    unpacked(tmp_path / "plain", members)
    for folder in ("packed", "plain"):
        data = read("texas", tmp_path / folder)
        assert np.array_equal(data.inputs.numpy(), bits)
        assert data.labels.tolist() == [99, 0, 6]
    unpacked(tmp_path / "plain", {"texas/100/labels": b"1\n2\n"})
    with pytest.raises(WrongInput, match="3 rows and 2 labels"):
        read("texas", tmp_path / "plain")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (csv([[0] * 446], [31]), "labels from 30 to 30; allowed: 0 to 29"),
        (csv([[0] * 446], [0]), "labels from -1"),
        (csv([[0] * 445], [1]), "row 1 of .* must be 446 bits"),
        (csv([[0] * 445 + [2]], [1]), "row 1 of .* must be 446 bits"),
        (csv([[0] * 446], [1])[:-9], "row 1 of .* must be 446 bits"),
        (csv([[0] * 446], [1]).replace(b"0,0", b"0;0"), "row 1 of .* must be 446 bits"),
        (csv([[0] * 446], ["x"]), "no label"),
        (csv([[0] * 446], ["9" * 40]), "no label"),
        (b"", "0 rows"),
    ],
)
def test_location_damage(tmp_path, text, word):
    unpacked(tmp_path, {"bangkok": text})
    with pytest.raises(WrongInput, match=word):
        read("location", tmp_path)


def test_an_archive_without_the_member(tmp_path):
    tgz(tmp_path / "dataset_location.tgz", {"other": b"1"})
    with pytest.raises(WrongInput, match="does not hold a file 'bangkok'"):
        read("location", tmp_path)
    tgz(tmp_path / "dataset_texas.tgz", {"texas/50/feats": b"1", "texas/100/labels": b"1"})
    with pytest.raises(WrongInput, match="must hold texas/100/feats"):
        read("texas", tmp_path)


def test_a_truncated_tgz(tmp_path, draw):
    path = tmp_path / "dataset_location.tgz"
    tgz(path, {"bangkok": csv(draw.integers(0, 2, (300, 446)), [1] * 300)})
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(WrongInput, match="truncated"):
        read("location", tmp_path)
