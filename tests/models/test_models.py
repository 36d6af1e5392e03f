import pytest
import torch
from torch import nn

from secateur.catalogue import find, methods
from secateur.errors import WrongInput
from secateur.models.create import flat_size, size
from secateur.models.mapp import Scaler, mapp_cnn
from secateur.models.resnet import Block

CIFAR100 = {"input_shape": (3, 32, 32), "classes": 100}
FEMNIST = {"input_shape": (1, 28, 28), "classes": 62}
COUNTS = {
    "conv-1": 3_815_566,
    "conv-2": 6_603_710,
    "conv-4": 13_657_406,
    "conv-6": 25_324_350,
    "vgg-4": 1_125_642,
    "vgg-6": 1_814_538,
    "vgg-9": 6_436_106,
    "vgg-11": 9_385_994,
    "lenet-zhu": 15_826,
    "cnn6": 154_256,
    "vgg11-bn": 9_231_114,
    "resnet18": 11_173_962,
    "resnet18-pool": 11_173_962,
    "resnet18-w16": 701_466,
    "vgg16-bn": 33_646_666,
    "densenet121": 6_956_426,
    "mlp": 151_198,
    "mapp-cnn-8": 25_418,
    "mapp-cnn-16": 99_210,
    "mapp-cnn-32": 391_946,
    "mapp-cnn-64": 1_558_026,
    "digits-cnn": 25_978,
    "mobilenet-v2-small": 99_962,
}
FLAT = {  # the width of what the head reads, as the papers' parameter counts fix it
    "conv-1": 1800,
    "conv-2": 3136,
    "conv-4": 6400,
    "conv-6": 4096,
    "vgg-4": 8192,
    "vgg-6": 2048,
    "vgg-9": 512,
    "vgg-11": 512,
    "lenet-zhu": 768,
    "cnn6": 3200,
    "vgg11-bn": 512,
    "vgg16-bn": 512,
    "mlp": 446,
}
SMALLEST = {
    "conv-2": 4,
    "conv-4": 4,
    "conv-6": 4,
    "vgg-4": 4,
    "vgg-6": 16,
    "vgg-9": 32,
    "vgg-11": 32,
    "vgg11-bn": 32,
    "vgg16-bn": 32,
    "densenet121": 15,
    "mapp-cnn-8": 8,
    "digits-cnn": 4,
}
ANY_SIDE = ("conv-1", "lenet-zhu", "cnn6", "resnet18", "resnet18-pool", "resnet18-w16", "mobilenet-v2-small")


def on_meta(name, input_shape, classes=7, rows=2):
    """The shape of the output, with nothing computed."""
    with torch.device("meta"):
        net = find("model", name)(input_shape=input_shape, classes=classes)
        return tuple(net(torch.empty(rows, *input_shape)).shape)


def test_the_catalogue_has_exactly_these_models():
    # A test elsewhere may add a model of its own, to see that it appears everywhere.
    ours = {name for name, entry in methods("model").items() if entry.make.__module__.startswith("secateur.")}
    assert ours == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_at_the_papers_input(name):
    row = find("model", name).describe()
    assert row["parameters"] == COUNTS[name]
    assert (row["input_shape"], row["classes"]) == (row["defaults"]["input_shape"], row["defaults"]["classes"])
    assert row["summary"].endswith(".")


@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("mapp-cnn-8", CIFAR100, 31_268),
        ("mapp-cnn-16", CIFAR100, 110_820),
        ("mapp-cnn-32", CIFAR100, 415_076),
        ("mapp-cnn-64", CIFAR100, 1_604_196),
        ("mapp-cnn-8", FEMNIST, 28_654),
        ("mapp-cnn-16", FEMNIST, 105_630),
        ("mapp-cnn-32", FEMNIST, 404_734),
        ("mapp-cnn-64", FEMNIST, 1_583_550),
    ],
)
def test_parameters_on_other_data(name, data, count):
    assert size(lambda: find("model", name)(**data)) == count


@pytest.mark.parametrize("name", FLAT)
def test_the_width_that_the_head_reads(name):
    with torch.device("meta"):
        net = find("model", name)()
    assert next(m for m in net.modules() if isinstance(m, nn.Linear)).in_features == FLAT[name]


@pytest.mark.parametrize("name", COUNTS)
def test_answers_and_traces(name):
    entry = find("model", name)
    net = entry().eval()
    rows = torch.randn(2, *entry.info["input_shape"], generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = net(rows)
        traced = torch.fx.symbolic_trace(net)(rows)
    assert output.shape == (2, entry.info["classes"])
    assert torch.isfinite(output).all()
    assert torch.equal(output, traced)


@pytest.mark.parametrize("name", COUNTS)
def test_no_module_is_used_in_two_places(name):
    with torch.device("meta"):
        net = find("model", name)()
    assert len(list(net.named_modules(remove_duplicate=False))) == len(list(net.modules()))


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        ("resnet18", (1, 28, 28)),
        ("resnet18-pool", (1, 28, 28)),
        ("resnet18-w16", (1, 8, 8)),
        ("conv-2", (3, 32, 40)),
        ("vgg-9", (1, 40, 64)),
        ("vgg11-bn", (1, 64, 64)),
        ("vgg16-bn", (1, 48, 64)),
        ("densenet121", (1, 28, 28)),
        ("mlp", (1, 8, 8)),
        ("mlp", (30,)),
        ("cnn6", (1, 28, 28)),
        ("lenet-zhu", (1, 28, 28)),
        ("digits-cnn", (3, 32, 32)),
        ("mobilenet-v2-small", (1, 8, 8)),
    ],
)
def test_other_inputs(name, input_shape):
    assert on_meta(name, input_shape, rows=3) == (3, 7)


@pytest.mark.parametrize(("name", "side"), SMALLEST.items())
def test_the_smallest_image_works_and_a_smaller_one_is_refused(name, side):
    assert on_meta(name, (3, side, side + 1)) == (2, 7)
    with pytest.raises(WrongInput, match=f"{name} needs images .* at least {side}; the data has the shape"):
        on_meta(name, (3, side + 1, side - 1))


@pytest.mark.parametrize("name", ANY_SIDE)
def test_these_take_a_single_pixel(name):
    assert on_meta(name, (3, 1, 1)) == (2, 7)


@pytest.mark.parametrize("name", sorted(set(COUNTS) - {"mlp"}))
def test_a_table_is_no_image(name):
    with pytest.raises(WrongInput, match=r"^model: .*\(channels, height, width\).*\(446,\)"):
        find("model", name)(input_shape=(446,))


@pytest.mark.parametrize(("name", "side"), [("resnet18", 32), ("resnet18-pool", 16)])
def test_the_stem_pool_halves_the_sides(name, side):
    with torch.device("meta"):
        net = find("model", name)()
        block = next(module for module in net if isinstance(module, Block))
        stem = net[: list(net).index(block)]
        assert stem(torch.empty(2, 3, 32, 32)).shape == (2, 64, side, side)


@pytest.mark.parametrize("name", ["digits-cnn", "lenet-zhu", "cnn6", "conv-1", "conv-6", "vgg-4", "vgg16-bn"])
@pytest.mark.parametrize("input_shape", [(1, 32, 32), (3, 33, 45)])
def test_the_head_takes_what_the_features_put_out(name, input_shape):
    """`flat_size` computes sides by arithmetic; a forward pass without values is its reference."""
    with torch.device("meta"):
        net = find("model", name)(input_shape=input_shape).eval()
        flat = next(index for index, layer in enumerate(net) if isinstance(layer, nn.Flatten))
        assert net[: flat + 1](torch.empty(1, *input_shape)).shape[1] == flat_size(net[:flat], input_shape)


def test_lenet_is_drawn_from_the_wide_uniform():
    weights = torch.cat([value.flatten() for value in find("model", "lenet-zhu")().parameters()])
    assert weights.abs().max() <= 0.5
    assert weights.var().item() == pytest.approx(1 / 12, rel=0.05)


def test_static_batchnorm_uses_the_batch_in_testing_too():
    net = find("model", "mapp-cnn-8")()
    rows = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = net.eval()(rows)
        assert torch.equal(together, net.train()(rows))
        assert not torch.allclose(together[:3], net(rows[:3]), atol=1e-3)
    assert not list(net.buffers())


def test_the_scaler_divides_by_the_rate_and_batchnorm_takes_it_back():
    assert torch.equal(Scaler(0.5)(torch.tensor([1.0, -3.0])), torch.tensor([2.0, -6.0]))  # Eq. 9
    whole, half = (mapp_cnn(8, (3, 32, 32), 10, rate=rate) for rate in (1.0, 0.5))
    half.load_state_dict(whole.state_dict())
    rows = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (whole(rows) - half(rows)).abs().max() < 7e-5


def test_digits_cnn_learns_the_digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = find("model", "digits-cnn")()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for rows in torch.arange(1280).view(-1, 64).repeat(5, 1):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
        optimiser.step()
    with torch.no_grad():
        right = net.eval()(inputs[1280:]).argmax(1) == targets[1280:]
    assert right.float().mean() > 0.9


def test_vgg_11_of_priprune_begins_where_it_can_learn():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = find("model", "vgg-11")()
    first, second, last = (layer.weight for layer in net if isinstance(layer, nn.Linear))
    # sqrt(6 / 512), sqrt(6 / 256), and of the last sqrt(2 / (1 + 1.5^2)) * sqrt(3 / 10)
    for weight, bound in ((first, 0.108253), (second, 0.153093), (last, 0.429669)):
        assert 0.99 * bound < float(weight.detach().abs().max()) <= bound + 1e-6
    rows = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float(net(rows).std(0).mean()) > 1e-4  # as torch begins its head, 2e-5
