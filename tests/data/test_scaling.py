import numpy as np
import pytest
import torch

from secateur.data.load import from_arrays, from_mapping, load
from secateur.data.scaling import BYTES, IMAGENET, PIXELS, SIGNED, DataForm, apply_form, candidates, rescale, scaling_of
from secateur.errors import WrongInput

PICTURES = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 5), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def read(inputs=PICTURES, **fields):
    return from_arrays("own", inputs, LABELS, form=DataForm(**fields))


@pytest.mark.parametrize("kind", ["bytes", "floats to 1", "floats to 255"])
def test_pixels_of_any_dtype_are_the_same(kind):
    stored = {"bytes": PICTURES, "floats to 1": PICTURES / 255, "floats to 255": PICTURES.astype(np.float64)}[kind]
    wanted = torch.from_numpy(PICTURES).float() / 255
    assert torch.allclose(read(stored, inputs_are="pixels").inputs, wanted, atol=1e-6)
    mean, std = (0.5, 0.25, 0.125), (0.5, 0.25, 0.5)
    by_hand = (wanted - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    scaled = read(stored, mean=mean, std=std)
    assert torch.allclose(scaled.inputs, by_hand, atol=1e-5) and scaled.mean == mean and scaled.described


def test_normalised_inputs_stay_as_they_are_stored():
    assert torch.allclose(read(inputs_are="normalised").inputs, torch.from_numpy(PICTURES).float(), atol=1e-3)
    signed = PICTURES / 127.5 - 1
    described = read(signed, mean=(0.5,), std=(0.5,))  # values below 0 are no pixels
    assert torch.equal(described.inputs, torch.from_numpy(signed.astype(np.float32)))
    assert described.mean == (0.5, 0.5, 0.5) and "as they are stored" in described.scaling


def test_mean_and_std_of_an_npz_are_honoured_and_flags_come_first(tmp_path):
    np.savez(tmp_path / "own.npz", x=PICTURES, y=LABELS, mean=np.zeros((3, 1, 1)), std=np.ones(3))
    assert torch.allclose(load(str(tmp_path / "own.npz")).inputs, torch.from_numpy(PICTURES) / 255, atol=1e-6)
    flags = DataForm(mean=(0.0,), std=(0.5,))
    doubled = load(str(tmp_path / "own.npz"), form=flags).inputs
    assert torch.allclose(doubled, torch.from_numpy(PICTURES) / 255 * 2, atol=1e-5)
    with pytest.raises(WrongInput, match="std: must be above 0"):
        from_mapping("own", {"x": PICTURES, "y": LABELS, "mean": [0.5], "std": [0.0]})


def test_a_transform_gets_pixels_and_returns_the_inputs(tmp_path, monkeypatch):
    (tmp_path / "my_transforms.py").write_text(
        "def crop(pixels): return pixels[..., 1:] * 3\n"
        "def fails(pixels): raise KeyError('no')\n"
        "def few(pixels): return pixels[:1]\n"
    )
    monkeypatch.chdir(tmp_path)
    cropped = read(transform="my_transforms:crop")
    assert torch.allclose(cropped.inputs, torch.from_numpy(PICTURES)[..., 1:] / 255 * 3, atol=1e-5)
    assert cropped.scaling == "inputs by my_transforms:crop"
    with pytest.raises(WrongInput, match="transform: my_transforms:fails failed with KeyError"):
        read(transform="my_transforms:fails")
    with pytest.raises(WrongInput, match="one row for each"):
        read(transform="my_transforms:few")


def test_forms_that_do_not_fit_are_refused():
    with pytest.raises(WrongInput, match=r"inputs_are: own holds values from -1 .* no pixels"):
        read(PICTURES / 127.5 - 1.0, inputs_are="pixels")
    with pytest.raises(WrongInput, match="mean: 2 numbers do not fit own; use 1 or 3"):
        read(mean=(0.1, 0.2), std=(1.0, 1.0))


def test_scalings_turn_into_each_other_and_are_listed():
    pooled = read()
    assert pooled.scaling == "pixels standardised by the pool's own statistics"
    back = rescale(pooled, scaling_of(pooled), PIXELS)
    assert torch.allclose(back.inputs, torch.from_numpy(PICTURES) / 255, atol=1e-6)
    assert torch.allclose(rescale(back, PIXELS, SIGNED).inputs, back.inputs * 2 - 1, atol=1e-6)
    assert [scaling.name for scaling in candidates(pooled)] == [
        PIXELS.name, pooled.scaling, SIGNED.name, BYTES.name, IMAGENET.name
    ]  # fmt: skip
    floats = candidates(read(PICTURES / 255))[1]
    assert np.allclose(floats.mean, pooled.mean, atol=1e-6) and np.allclose(floats.std, pooled.std, atol=1e-6)


def test_columns_of_a_table_are_scaled_in_their_own_units():
    table = np.array([[1.0, 100.0], [3.0, 300.0], [1.0, 100.0], [3.0, 300.0], [1.0, 100.0], [3.0, 300.0]])
    stored, pool = candidates(read(table))
    assert (stored.name, pool.mean, pool.std) == ("inputs as they are stored", (2.0, 200.0), (1.0, 100.0))
    assert read(table, mean=(2.0, 200.0), std=(1.0, 100.0)).inputs[:2].tolist() == [[-1, -1], [1, 1]]


def test_labels_must_start_at_0():
    with pytest.raises(WrongInput, match=r"labels from 1 to 3; they must start at 0: subtract 1"):
        from_arrays("own", PICTURES, LABELS + 1)
    assert from_arrays("own", PICTURES, LABELS + 1, form=DataForm(classes=10)).classes == 10


def test_tokens_stay_whole():
    tokens = from_arrays("own", np.arange(12, dtype=np.int32).reshape(6, 2), LABELS)
    assert tokens.inputs.dtype == torch.int64 and tokens.scaling == "inputs as they are stored"
    with pytest.raises(WrongInput, match="whole numbers"):
        apply_form(tokens, DataForm(inputs_are="pixels"))
