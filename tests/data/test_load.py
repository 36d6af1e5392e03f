import json
import logging

import numpy as np
import pytest
import torch

from secateur.cli import main
from secateur.data.load import _warn_unverified, load
from secateur.errors import WrongInput


def picture(path, colour=(10, 20, 30), size=(5, 4), mode="RGB"):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_unknown_names_get_the_nearest():
    with pytest.raises(WrongInput, match=r"data: 'cifar' is not known; did you mean 'cifar100?'"):
        load("cifar")


@pytest.mark.parametrize("source", ["no/such.npz", "no.npz", "./nothing"])
def test_paths_that_do_not_exist(source):
    with pytest.raises(
        WrongInput,
        match=r"does not exist; allowed: a \.npz, \.csv or \.parquet file, a folder of images, or a name: .*digits",
    ):
        load(source)


def test_an_unknown_kind_of_file(tmp_path):
    (tmp_path / "x.json").write_bytes(b"{}")
    with pytest.raises(WrongInput, match="not readable as data"):
        load(str(tmp_path / "x.json"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(WrongInput, match="cannot be read as parquet"):
        load(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("names", [("inputs", "labels"), ("x", "y")])
def test_npz_of_numbers_is_taken_as_it_is(tmp_path, names):
    inputs = np.random.default_rng(0).normal(size=(6, 3))
    np.savez(tmp_path / "mine.npz", **dict(zip(names, (inputs, np.array([0, 1, 2, 0, 1, 2])), strict=True)))
    data = load(str(tmp_path / "mine.npz"))
    assert (data.name, data.classes, data.train_size, data.mean) == ("mine", 3, 6, ())
    assert torch.equal(data.inputs, torch.from_numpy(inputs.astype(np.float32)))


@pytest.mark.parametrize("shape", [(8, 6, 5), (8, 6, 5, 3), (8, 3, 6, 5)])
def test_npz_of_bytes_is_scaled_and_standardised(tmp_path, shape):
    pixels = np.random.default_rng(0).integers(0, 200, shape, dtype=np.uint8)
    labels = np.arange(8, dtype=np.uint8) % 2
    np.savez_compressed(tmp_path / "p.npz", x=pixels, y=labels, train_size=6, writers=np.arange(8))
    data = load(str(tmp_path / "p.npz"))
    channels = 1 if len(shape) == 3 else 3
    assert data.input_shape == (channels, 6, 5)
    assert (data.train_size, data.writers.tolist()) == (6, list(range(8)))
    assert data.inputs.mean((0, 2, 3)).abs().max() < 1e-5
    assert (data.inputs.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-5
    back = (data.inputs * torch.tensor(data.std).view(-1, 1, 1) + torch.tensor(data.mean).view(-1, 1, 1)) * 255
    first = pixels.reshape(8, 6, 5, -1).transpose(0, 3, 1, 2) if shape[1] == 6 else pixels
    assert np.array_equal(back.round().numpy(), first)


def test_constant_pictures_stay_finite(tmp_path):
    np.savez(tmp_path / "p.npz", x=np.full((4, 3, 3), 7, dtype=np.uint8), y=np.array([0, 1, 0, 1]))
    assert load(str(tmp_path / "p.npz")).inputs.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("field", "arrays"),
    [
        ("data", {"x": np.zeros((2, 2))}),
        ("labels", {"x": np.zeros((2, 2)), "y": np.array([0.0, 1.0])}),
        ("labels", {"x": np.zeros((2, 2)), "y": np.array([0, -1])}),
        ("labels", {"x": np.zeros((2, 2)), "y": np.array([[0], [1]])}),
        ("inputs", {"x": np.zeros((3, 2)), "y": np.array([0, 1])}),
        ("inputs", {"x": np.array(["a", "b"]), "y": np.array([0, 1])}),
        ("inputs", {"x": np.full((2, 2), np.nan), "y": np.array([0, 1])}),
        ("inputs", {"x": np.zeros((2, 0, 3), dtype=np.uint8), "y": np.array([0, 1])}),
        ("inputs", {"x": np.zeros((0, 2)), "y": np.zeros(0, dtype=int)}),
        ("labels", {"x": np.zeros((2, 2)), "y": np.array([0, 10**9])}),
        ("train_size", {"x": np.zeros((2, 2)), "y": np.array([0, 1]), "train_size": 3}),
        ("train_size", {"x": np.zeros((2, 2)), "y": np.array([0, 1]), "train_size": np.zeros(0, dtype=int)}),
        ("writers", {"x": np.zeros((2, 2)), "y": np.array([0, 1]), "writers": np.array([1])}),
    ],
)
def test_npz_with_wrong_fields(tmp_path, field, arrays):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(WrongInput) as caught:
        load(str(tmp_path / "x.npz"))
    assert caught.value.field == field


def test_a_folder_of_colour_images(tmp_path):
    picture(tmp_path / "mine/zebra/1.png", (255, 0, 0))
    picture(tmp_path / "mine/ant/2.png", (0, 255, 0))
    picture(tmp_path / "mine/ant/1.bmp", 128, mode="L")
    (tmp_path / "mine/.hidden").write_text("x")
    data = load(str(tmp_path / "mine"))
    assert (data.name, data.classes, data.labels.tolist()) == ("mine", 2, [0, 0, 1])
    assert data.input_shape == (3, 4, 5)
    back = data.inputs[:, :, 0, 0] * torch.tensor(data.std) + torch.tensor(data.mean)
    assert (back * 255).round().tolist() == [[128, 128, 128], [0, 255, 0], [255, 0, 0]]


def test_the_current_folder(tmp_path, monkeypatch):
    picture(tmp_path / "pets/a/1.png")
    monkeypatch.chdir(tmp_path / "pets")
    assert load(".").name == "pets"


def test_a_folder_of_gray_images(tmp_path):
    picture(tmp_path / "a/1.png", 3, mode="L")
    picture(tmp_path / "b/1.png", 4, mode="L")
    assert load(str(tmp_path)).input_shape == (1, 4, 5)


def test_pictures_in_train_are_the_members(tmp_path):
    for name in ("train/a/2.png", "train/b/1.png", "train/b/9.png", "test/a/1.png", "test/b/2.png"):
        picture(tmp_path / name)
    data = load(str(tmp_path))
    assert (data.train_size, data.labels.tolist(), data.classes) == (3, [0, 1, 1, 0, 1], 2)


def test_train_and_test_may_be_classes(tmp_path):
    picture(tmp_path / "train/1.png")
    picture(tmp_path / "test/1.png")
    data = load(str(tmp_path))
    assert (data.train_size, data.labels.tolist(), data.classes) == (2, [0, 1], 2)


def test_image_folders_that_are_wrong(tmp_path):
    with pytest.raises(WrongInput, match="holds no pictures"):
        load(str(tmp_path))
    picture(tmp_path / "a/1.png")
    picture(tmp_path / "a/2.png", size=(5, 5))
    with pytest.raises(WrongInput, match="pictures of 5 x 4 and of 5 x 5 pixels"):
        load(str(tmp_path))
    (tmp_path / "a/2.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n")
    with pytest.raises(WrongInput, match=r"a/2\.png is not a readable picture"):
        load(str(tmp_path))
    (tmp_path / "a/2.png").rename(tmp_path / "notes.txt")
    with pytest.raises(WrongInput, match=r"holds notes\.txt; pictures must be in one sub-folder"):
        load(str(tmp_path))


def test_a_function_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "my_own_data.py").write_text(
        "import torch\n"
        "from secateur.data.dataset import Dataset\n"
        "def pair(): return torch.ones(4, 2), torch.tensor([0, 1, 1, 0])\n"
        "def whole(): return Dataset('whole', torch.ones(4, 2), torch.tensor([0, 1, 1, 0]), 5, 2)\n"
        "def graph(): return torch.ones(4, 2, requires_grad=True), [0, 1, 1, 0]\n"
        "def ragged(): return [[1.0], [1.0, 2.0]], [0, 1]\n"
        "def wrong(): return 3\n"
        "def fails(): raise KeyError('gone')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load("my_own_data:pair").classes == 2
    assert load("my_own_data:whole").classes == 5
    assert not load("my_own_data:graph").inputs.requires_grad
    with pytest.raises(WrongInput, match="inputs are not readable"):
        load("my_own_data:ragged")
    with pytest.raises(WrongInput, match="int is not allowed"):
        load("my_own_data:wrong")
    with pytest.raises(WrongInput, match="failed with KeyError: 'gone'"):
        load("my_own_data:fails")
    with pytest.raises(WrongInput, match=r"cannot be imported \(AttributeError"):
        load("my_own_data:none")
    with pytest.raises(WrongInput, match=r"cannot be imported \(ModuleNotFoundError"):
        load("no_such_module:none")


def small_mnist(folder):
    """Forty images in MNIST's files, which are not the published ones."""
    import gzip

    draw = np.random.default_rng(0)
    (folder / "MNIST/raw").mkdir(parents=True)
    for part in ("train", "t10k"):
        images, labels = draw.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            sizes = np.array(array.shape, ">u4").tobytes()
            content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            file = folder / f"MNIST/raw/{part}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(content))
    return folder


def test_files_that_are_not_the_published_ones_are_told_once(tmp_path, caplog):
    _warn_unverified.cache_clear()
    small_mnist(tmp_path)
    assert [load("mnist", tmp_path).verified for _ in range(2)] == [False, False]
    (said,) = caplog.messages
    assert "mnist" in said and "not the published ones" in said


def test_nothing_is_told_of_data_without_published_checksums(tmp_path, caplog):
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3)), y=np.array([0, 1, 0, 1]))
    (tmp_path / "bangkok").write_text("".join(f'"{i + 1}",' + ",".join("01" * 223) + "\n" for i in range(30)))
    assert load("digits").verified
    assert load(str(tmp_path / "mine.npz")).verified is None
    assert load("location", tmp_path, download=False).verified is None
    assert not caplog.messages


def test_the_warning_goes_to_standard_error_and_json_stays_clean(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    _warn_unverified.cache_clear()  # it is told once a process
    small = ["--model", "mlp", "--set", "train.epochs=1", "--set", "finetune.epochs=1", "--json"]
    out = ["--data", "mnist", "--data-folder", str(small_mnist(tmp_path)), "--out", str(tmp_path / "m.safetensors")]
    assert main(["prune", *small, *out]) == 0
    printed = capsys.readouterr()
    assert isinstance(json.loads(printed.out), list)
    assert sum("not the published ones" in line for line in printed.err.splitlines()) == 1
