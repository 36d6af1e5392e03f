"""The generator: pictures of any size inside the box, its loss by hand, classes that differ, and files."""

import pytest
import torch

from secateur.attacks.inversion.generator import Critic, Generator, critic_loss, train_generator
from secateur.errors import WrongInput
from secateur.interfaces import Batch

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 5, 9), (1, 3, 3)]


def box(colours):
    return torch.linspace(-2, -1, colours).view(-1, 1, 1), torch.linspace(1, 3, colours).view(-1, 1, 1)


def two_classes(rng):
    """Dark pictures and bright ones, in [-1, 1]."""
    labels = torch.arange(64) % 2
    return Batch(torch.randn(64, 1, 8, 8, generator=rng) * 0.1 + labels.view(-1, 1, 1, 1) - 0.5, labels)


class Kept:
    """Keeps the state of every step, and may stop the training after some."""

    def __init__(self, state=None, stop=None):
        self.state, self.stop, self.told = state, stop, 0

    def advance(self, iterations):
        self.told += iterations

    def load(self):
        return self.state

    def save(self, state, pictures):
        self.state = {name: value.clone() for name, value in state.items()}
        if self.told == self.stop:
            raise KeyboardInterrupt


def trained(rng, steps, **settings):
    limits = (torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 1.0))
    return train_generator(two_classes(rng), 2, (1, 8, 8), limits, steps, rng, width=4, **settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_have_the_shape_and_lie_in_the_box(shape, rng):
    generator, critic = Generator(shape, 10, box(shape[0]), width=4), Critic(shape, 10, width=4)
    labels = torch.arange(6)
    pictures = generator(torch.randn(6, 128, generator=rng) * 50, labels)
    assert pictures.shape == (6, *shape)
    low, high = box(shape[0])
    assert bool(((pictures >= low) & (pictures <= high)).all())
    assert critic(pictures, labels).shape == (6,)


def test_the_critics_loss_by_hand(rng):
    """A linear critic's slope is its weight w everywhere, so the penalty is 10 (|w| - 1)^2; here |w| = 3."""
    weight = torch.zeros(1, 2, 2)
    weight[0, 0] = torch.tensor([3.0, 0.0])
    real = Batch(torch.full((4, 1, 2, 2), 2.0), torch.zeros(4, dtype=torch.int64))
    fake = torch.full((4, 1, 2, 2), 0.5)
    loss = critic_loss(lambda x, _: (x * weight).sum((1, 2, 3)), real, fake, 10.0, rng)
    assert float(loss) == pytest.approx(3 * 0.5 - 3 * 2.0 + 10 * 4)


def test_training_makes_pictures_of_the_class_that_is_asked_for(rng):
    generator = trained(rng, 60, learning_rate=4e-3, batch_size=16)
    noise = torch.randn(50, 128, generator=rng)
    dark, bright = (generator(noise, torch.full((50,), label)).mean() for label in (0, 1))
    assert float(dark) < -0.2 and float(bright) > 0.2
    assert not generator.training and not any(value.requires_grad for value in generator.parameters())


def test_equal_chance_gives_equal_generators_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    watches = [Kept(), Kept()]
    one, other = (trained(torch.Generator().manual_seed(5), 3, watch=watch) for watch in watches)
    assert [watch.told for watch in watches] == [3, 3]
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    another = trained(torch.Generator().manual_seed(6), 3)
    assert not torch.equal(one.first.weight, another.first.weight)


def test_a_training_that_was_killed_goes_on_as_if_it_never_was():
    whole, watch = trained(torch.Generator().manual_seed(5), 5), Kept(stop=2)
    with pytest.raises(KeyboardInterrupt):
        trained(torch.Generator().manual_seed(5), 5, watch=watch)
    assert int(watch.state["step"]) == 2
    again = trained(torch.Generator().manual_seed(5), 5, watch=Kept(watch.state))
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        (Batch(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)), (1, 8, 8), "0 public pictures"),
        (Batch(torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64)), (1, 9, 9), "of the shape"),
        (Batch(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2])), (1, 8, 8), "labels from 0 to 2"),
        (Batch(torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)), (8,), "makes pictures"),
    ],
)
def test_data_that_does_not_fit_is_refused(data, shape, message, rng):
    with pytest.raises(WrongInput, match=message):
        train_generator(data, 2, shape, box(1), 1, rng)


def test_training_that_breaks_is_said(rng):
    with pytest.raises(WrongInput, match="became NaN"):
        trained(rng, 4, learning_rate=1e30)
