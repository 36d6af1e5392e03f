"""Local training against torch's own, and many clients against one by one."""

import pytest
import torch
from torch import nn

from alone import pictures
from secateur import tree
from secateur.config import defense
from secateur.defenses.dp import DifferentialPrivacy
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.federated.client_training import LocalTraining, binary_cross_entropy, train
from secateur.federated.faults import Faults
from secateur.functional import Functional
from secateur.gpu import graphs
from tiny_rules import LOCAL, Half, Moving, Noisy, Stale, Withhold, bn_net, federation, plain_net, run


def objective(net):
    function = Functional(net, training=True, device="cpu")

    def loss(params, buffers, inputs, labels, *noise):
        return nn.functional.cross_entropy(function(params | buffers, inputs, noise), labels)

    return loss


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.9, 0.0), (0.5, 0.01)])
def test_one_client_is_plain_sgd(momentum, decay):
    net, data = plain_net(), pictures()
    batches = [(data.inputs[i : i + 4].double(), data.labels[i : i + 4]) for i in (0, 4, 8)]
    start = tree.params_of(net)
    before = tree.clone(start)
    made = train(objective(net), start, {}, {}, batches, LocalTraining(3, None, 4, 0.1, momentum, decay), summing=True)
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum, weight_decay=decay)
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for inputs, labels in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        total = {name: value + net.get_parameter(name).grad for name, value in total.items()}
        optimiser.step()
    for name, value in net.named_parameters():
        torch.testing.assert_close(made.params[name], value.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(made.summed[name], total[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(made.last[name], value.grad, rtol=0, atol=1e-12)
        assert torch.equal(start[name], before[name])  # what was given stays as it is


def test_what_a_mask_drops_is_zero_and_its_gradient_is_still_told():
    net, data = plain_net(), pictures()
    mask = {"0.weight": torch.arange(27).view(3, 1, 3, 3) % 2 == 0}
    batch = (data.inputs[:4].double(), data.labels[:4])
    made = train(objective(net), tree.params_of(net), {}, mask, [batch] * 3, LocalTraining(3, None, 4, 0.1, 0.9, 0.1))
    assert (made.params["0.weight"][~mask["0.weight"]] == 0).all()
    assert (made.params["0.weight"][mask["0.weight"]] != 0).all()
    assert (made.last["0.weight"][~mask["0.weight"]] != 0).any()


def test_a_fresh_start_is_changed_where_it_is():
    net, data = plain_net(), pictures()
    mask = {"0.weight": torch.arange(27).view(3, 1, 3, 3) % 2 == 0}
    batches = [(data.inputs[:4].double(), data.labels[:4])] * 2
    start = tree.params_of(net)
    kept = tree.mask_tree(tree.clone(start), mask)
    one, other = (
        train(objective(net), each, {}, mask, batches, LOCAL, fresh=fresh)
        for each, fresh in ((start, False), (kept, True))
    )
    for name, value in one.params.items():
        assert torch.equal(other.params[name], value)
        assert other.params[name].data_ptr() == kept[name].data_ptr() != value.data_ptr()


def test_binary_cross_entropy_by_hand():
    logits, labels = torch.zeros(2, 4), torch.tensor([1, 3])
    assert float(binary_cross_entropy(logits, labels)) == pytest.approx(torch.log(torch.tensor(2.0)).item())
    logits = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    shares = nn.functional.one_hot(torch.tensor([1, 0])).float()  # as an attacker tries them
    assert binary_cross_entropy(logits, shares) == binary_cross_entropy(logits, torch.tensor([1, 0]))
    alone = torch.stack([binary_cross_entropy(logits[i], torch.tensor(label)) for i, label in enumerate((1, 0))])
    assert torch.vmap(binary_cross_entropy)(logits, torch.tensor([1, 0])).equal(alone)  # each example of its own


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": None}, {"epochs": 1}, {"learning_rate": 0}, {"momentum": 1}])
def test_wrong_terms_are_refused(wrong):
    with pytest.raises(WrongInput):
        LocalTraining(**wrong)


CASES = {
    "plain": {},
    "batchnorm and dropout": {"net": bn_net},
    "momentum": {"local": LocalTraining(3, None, 4, 0.1, 0.9, 0.01)},
    "uniform": {"averaging": "uniform"},
    "server momentum": {"server_momentum": 0.5, "server_rate": 0.7},
    "pruned": {"base": Half()},
    "pruned, momentum": {"base": Half(), "local": LocalTraining(3, None, 4, 0.1, 0.9, 0.01), "broadcast": "dense"},
    "squares": {"base": Stale(), "broadcast": "dense"},
    "clients' own masks": {"base": Moving(), "averaging": "coverage"},
    "withheld": {"base": Half(), "withholding": Withhold(pseudo=False), "averaging": "coverage"},
    "withheld, put back": {"base": Half(), "withholding": Withhold()},
    "withheld, put back, dense": {"base": Half(), "withholding": Withhold(), "broadcast": "dense"},
    "own masks and withheld": {"base": Moving(), "withholding": Withhold()},
    "own turn": {"base": Half(), "custom_turn": Noisy()},
    "own turn and own masks": {"base": Moving(), "custom_turn": Noisy(), "averaging": "coverage"},
    "dgp": {"upload": upload_of(defense("dgp+error-feedback"))},
    "noise": {"upload": upload_of(defense("noise"))},
    "fedsgd": {"method": "fedsgd", "local": LocalTraining(1, None, 4, 0.1)},
    "epochs": {"local": LocalTraining(None, 2, 3, 0.1)},
    "fixed batches": {"fixed_batches": True, "view": "sum"},
    "dp": {"upload": DifferentialPrivacy(), "local": LocalTraining(1, None, 4, 0.1), "base": Half()},
    "dp, withheld": {
        "upload": DifferentialPrivacy(),
        "local": LocalTraining(1, None, 4, 0.1),
        "withholding": Withhold(),
    },
}
DRAWN = ("batchnorm and dropout", "own turn", "own turn and own masks", "noise", "dp", "dp, withheld")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


@pytest.mark.parametrize("case", CASES)
def test_stacked_and_one_by_one_are_equal(case):
    made = {}
    for execution in ("sequential", "stacked"):
        terms = dict(CASES[case])
        net = terms.pop("net", plain_net)()
        fed = federation(net, execution=execution, **terms)
        made[execution] = run(fed), fed
    (rows, one), (other_rows, many) = made.values()
    assert [(r.metric, r.round, r.client) for r in rows] == [(r.metric, r.round, r.client) for r in other_rows]
    for mine, theirs in zip(rows, other_rows, strict=True):
        assert mine.value == pytest.approx(theirs.value, abs=1e-9)
    for name, value in one.model().items():
        torch.testing.assert_close(many.model()[name], value, rtol=0, atol=1e-9)
    assert one.states.keys() == many.states.keys()
    for client, state in one.states.items():
        for name, value in state.items():
            torch.testing.assert_close(many.states[client][name], value, rtol=0, atol=1e-9)


@needs_cuda
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_captured_equals_eager_and_where_nothing_is_drawn_a_cpu(case, monkeypatch):
    if case.startswith("dp"):
        pytest.importorskip("opacus")
    made = []
    for device, warmups in (("cuda", 3), ("cuda", 10**9), ("cpu", 0)):
        monkeypatch.setattr(graphs, "WARMUPS", warmups)
        terms = dict(CASES[case]) | {"rounds": 8, "faults": Faults(drop_out=0.1, nan=0.1, shape=0.1)}
        fed = federation(terms.pop("net", plain_net)(), device=device, **terms)
        made.append((run(fed), fed))
    (rows, one), *others = made if case not in DRAWN else made[:2]
    for other_rows, other in others:
        lost, told = ([(r.round, r.value) for r in each if r.metric == "lost_clients"] for each in (rows, other_rows))
        assert lost == told and lost
        for name, value in one.model().items():
            torch.testing.assert_close(other.model()[name].to(value.device), value, rtol=0, atol=1e-9)
        for client, state in other.states.items():
            for name, value in state.items():
                torch.testing.assert_close(one.states[client][name].to(value.device), value, rtol=0, atol=1e-9)


def test_a_step_is_a_step_of_the_whole_batch():
    """Everybody takes part with one step of all its rows: FedAvg is one step on all data, weighted by rows."""
    net, data = plain_net(), pictures(40, 8)
    parts = [torch.arange(0, 8), torch.arange(8, 40)]
    fed = federation(shares=parts, per_round=2, rounds=1, local=LocalTraining(None, 1, 32, 0.1))
    run(fed)
    nn.functional.cross_entropy(net(data.inputs[:40].double()), data.labels[:40]).backward()
    for name, value in net.named_parameters():
        torch.testing.assert_close(fed.model()[name], value.detach() - 0.1 * value.grad, rtol=0, atol=1e-12)
    assert LOCAL.is_plain
