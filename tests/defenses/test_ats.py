"""ATS: its 50 operations level by level against Pillow, hand-computed pictures, and the transform of a batch."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import nn

import secateur
from secateur import catalogue, tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import Audit, Invert, choice, defense, inversion, read
from secateur.defenses.ats import (
    CHOSEN,
    CONVNET,
    KINDS,
    OPERATIONS,
    AutomaticTransformationSearch,
    Operation,
    read_policies,
    write_policies,
)
from secateur.errors import WrongInput
from secateur.evaluation.client import AttackedClient, transform_of
from secateur.experiments.invert import label_comparisons
from secateur.interfaces import Batch, Knowledge
from secateur.models.small import lenet_zhu
from secateur.seeding import derive

UP, DOWN = torch.tensor([1]), torch.tensor([-1])


def by_pillow(operation, image, sign):
    """What Pillow makes of it."""
    name, magnitude = operation.name, operation.magnitude
    width, height = image.size
    enhance = {
        "brightness": ImageEnhance.Brightness,
        "colour": ImageEnhance.Color,
        "contrast": ImageEnhance.Contrast,
        "sharpness": ImageEnhance.Sharpness,
    }
    if name in enhance:
        return enhance[name](image).enhance(1 + magnitude * sign)
    if name == "rotate":
        turned = image.convert("RGBA").rotate(magnitude)
        return Image.composite(turned, Image.new("RGBA", turned.size, (128,) * 4), turned).convert(image.mode)
    affine = {
        "shear-y": ((1, 0, 0, magnitude * sign, 1, 0), Image.Resampling.BICUBIC),
        "translate-x": ((1, 0, magnitude * width * sign, 0, 1, 0), Image.Resampling.NEAREST),
        "translate-y": ((1, 0, 0, 0, 1, magnitude * height * sign), Image.Resampling.NEAREST),
    }
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name][0], affine[name][1], fillcolor=0)
    plain = {"invert": ImageOps.invert, "autocontrast": ImageOps.autocontrast, "equalize": ImageOps.equalize}
    if name in plain:
        return plain[name](image)
    return {"posterize": ImageOps.posterize, "solarize": ImageOps.solarize}[name](image, magnitude)


@pytest.mark.parametrize("sign", [UP, DOWN], ids=["up", "down"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 9, 14)], ids=str)
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS)), ids=str)
def test_an_operation_is_pillows_level_by_level(operation, shape, sign):
    rng = np.random.default_rng(OPERATIONS.index(operation))
    smooth = np.add.outer(np.arange(shape[1]) * 2, np.arange(shape[2]) * 3)[None] + rng.integers(30, 90, shape)
    for levels in (rng.integers(0, 256, shape), smooth.clip(0, 255)):
        array = levels.astype(np.uint8)
        image = Image.fromarray(array[0] if shape[0] == 1 else array.transpose(1, 2, 0))
        expected = np.asarray(by_pillow(operation, image, int(sign)))
        expected = torch.from_numpy(expected.copy()).long().view(*shape[1:], -1).permute(2, 0, 1)
        found = operation(torch.from_numpy(array).long()[None], sign)[0]
        assert torch.equal(found, expected)


def test_the_list_is_the_authors():
    assert len(OPERATIONS) == 50 and {each.name for each in OPERATIONS} == set(KINDS)
    assert OPERATIONS[3] == ("translate-x", 9) and OPERATIONS[1] == ("contrast", 6)
    assert OPERATIONS[7] == ("translate-y", 2) and OPERATIONS[43] == ("translate-y", 3)
    assert OPERATIONS[18] == ("contrast", 7) and OPERATIONS[49] == ("autocontrast", 1)


def test_magnitudes_by_hand():
    assert Operation("rotate", 2).magnitude == pytest.approx(20 / 3)
    assert Operation("translate-x", 9).magnitude == pytest.approx(150 / 331)
    assert Operation("contrast", 6).magnitude == pytest.approx(1 / 3)
    assert Operation("posterize", 5).magnitude == 6  # 8 - 4 * 5/9 = 5.8
    assert Operation("solarize", 4).magnitude == pytest.approx(256 * 5 / 9)


def test_operations_by_hand():
    levels = torch.tensor([[[[10, 20], [60, 110]]]])
    assert Operation("invert", 0)(levels, UP).tolist() == [[[[245, 235], [195, 145]]]]
    assert Operation("autocontrast", 0)(levels, UP).tolist() == [[[[0, 25], [127, 255]]]]  # (v - 10) 255 / 100
    assert Operation("brightness", 9)(levels, UP).tolist() == [[[[15, 30], [90, 165]]]]
    assert Operation("brightness", 9)(levels, DOWN).tolist() == [[[[5, 10], [30, 55]]]]
    assert Operation("contrast", 9)(levels, DOWN).tolist() == [[[[30, 35], [55, 80]]]]  # half-way to the mean of 50
    assert Operation("translate-y", 9)(levels, UP).tolist() == [[[[60, 110], [0, 0]]]]  # .9 of a pixel


def test_a_batch_in_the_models_units_is_the_pictures_one_by_one():
    rng = torch.Generator().manual_seed(0)
    levels = torch.randint(256, (6, 3, 8, 8), generator=rng)
    mean, std = torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(3, 1, 1)
    inputs = (levels / 255 - mean) / std
    transform = AutomaticTransformationSearch("0-1-7/10-16-49/2").transform(mean, std)
    used = transform(inputs, torch.Generator().manual_seed(3))
    again = torch.Generator().manual_seed(3)
    signs = torch.randint(2, (3, 6), generator=again) * 2 - 1
    which = torch.randint(3, (6,), generator=again)
    assert len(which.unique()) > 1
    for i, policy in enumerate(which.tolist()):
        expected = levels[i : i + 1]
        for place, number in enumerate(((0, 1, 7), (10, 16, 49), (2,))[policy]):
            expected = OPERATIONS[number](expected, signs[place, i : i + 1])
        torch.testing.assert_close(used[i], (expected[0] / 255 - mean) / std)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_seed_gives_the_same_pictures_and_changes_nothing_that_is_given(dtype):
    inputs = torch.rand(4, 1, 10, 10, dtype=dtype, generator=torch.Generator().manual_seed(1))
    before, unit = inputs.clone(), (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    transform = AutomaticTransformationSearch().transform(*unit)
    one, two, other = (transform(inputs, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(inputs, before) and one.dtype == dtype and one.shape == inputs.shape
    assert float(one.min()) >= 0 and float(one.max()) <= 1


def test_policies_are_read_and_written():
    for text in (CHOSEN, CONVNET, "5", "1-2/3"):
        assert write_policies(read_policies(text)) == text
    for wrong in ("", "3-x", "3-1-7+43", "3--1"):
        with pytest.raises(WrongInput, match=r"policies: .* is not readable; use for example 3-1-7/43-18-18"):
            AutomaticTransformationSearch(wrong)
    with pytest.raises(WrongInput, match=r"operation 50 is not allowed; must be in \[0, 49\]"):
        choice("defense", "ats:policies=3-1-50")


def test_it_acts_on_inputs_and_other_commands_refuse_it():
    assert catalogue.find("defense", "ats").info["acts_on"] == "inputs"
    assert str(read(Invert, None, {"defense": "ats:policies=5/1-2"}).defense[0]) == "ats:policies=5/1-2"
    with pytest.raises(WrongInput, match="ats acts on updates; use secateur invert"):
        read(Audit, None, {"defense": "ats"})


def test_the_client_makes_its_update_of_the_transformed_pictures():
    net = lenet_zhu((1, 12, 12), 10)
    mean, std = torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), 0.5)
    raw = Batch(
        (torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(1)) - mean) / std, torch.tensor([3, 4])
    )
    knowledge = Knowledge(net, (1, 12, 12), 10, mean, std, batch_size=2)
    transform = transform_of(defense("ats+dgp"), mean, std)
    client = AttackedClient(net, tree.state_of(net), knowledge, transform=transform, seed=7)
    used = client.transform_target(raw, 3)
    assert torch.equal(used.inputs, transform(raw.inputs, derive(7, "transform", 3))) and used.labels is raw.labels
    for attack in ("ig:iterations=2", "gi:iterations=2"):  # each sees the same update of a target
        _, ((view,),) = client.show_targets(inversion(attack).make(), [raw], None, 3)
        for name, value in gradient_update(net, tree.state_of(net), used).values.items():
            assert torch.equal(view.update.values[name], value)
    assert not torch.equal(client.transform_target(raw, 4).inputs, used.inputs)
    assert label_comparisons(client) == [{"against": "used"}, {"against": "raw"}]
    assert transform_of(defense("dgp"), mean, std) is None


def test_a_reconstruction_is_compared_with_what_was_used_and_with_the_raw_picture(rng):
    inputs = torch.rand(1, 1, 3, 3, generator=rng).mul(255).round() / 255
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.LeakyReLU(0.2), nn.Linear(6, 4))
    batch = Batch(inputs, torch.tensor([3]))
    report = secateur.invert(net, batch, "r-gap", defense="ats:policies=0")  # the negative of the picture
    found = {row.extra["against"]: row.value for row in report.rows if row.metric == "mse"}
    assert found["used"] == pytest.approx(0, abs=1e-6)  # in closed form: the transform does not disturb the gradient
    assert found["raw"] == pytest.approx(float((1 - 2 * inputs).square().mean()), rel=1e-3)
