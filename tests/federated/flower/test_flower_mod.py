"""The mod in an app, and the strategies around an app's own."""

import contextlib
import re

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message
from flwr.serverapp.strategy import FedAvg
from talking import answer, asked, context
from torch import nn

from secateur import tree
from secateur.attacks.inversion.rob import Rob
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.soteria import Soteria
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
from secateur.evaluation.calibration import WEIGHTS
from secateur.federated.flower import AuditedStrategy, Auditor, DecodingStrategy, download_mod, upload_mod
from secateur.federated.flower.link import arrays_of, pack, single_record, size_of, tensors_of, unpack
from secateur.interfaces import Batch, Knowledge
from secateur.report.update_verdict import judge_updates
from secateur.runs.folder import load_rows
from secateur.wire import decode, encode

MODEL = {"w": torch.zeros(4), "bn.running_mean": torch.zeros(2), "count": torch.tensor(0)}
STEP = {
    "w": torch.tensor([4.0, -3.0, 2.0, -1.0]),
    "bn.running_mean": torch.tensor([0.1, 0.2]),
    "count": torch.tensor(1),
}


def trains(step):
    """An app whose client always makes the same step."""
    return lambda message, _: answer(
        message, {n: tensors_of(single_record(message.content, "")[1])[n] + v for n, v in step.items()}
    )


def turned(mod, given, home, number=1, step=STEP):
    return mod(asked(given, number), home, trains(step))


def values(reply):
    return tensors_of(single_record(reply.content, "")[1])


def test_what_is_sent_is_what_the_defense_leaves_of_the_step():
    found = values(turned(upload_mod(TopK(keep=0.5)), MODEL, context()))
    assert found["w"].tolist() == [4.0, -3.0, 0.0, 0.0]
    assert torch.equal(found["bn.running_mean"], STEP["bn.running_mean"]) and found["count"] == 1
    assert list(found) == list(MODEL)


def test_the_residual_stays_in_the_context_and_is_sent_later():
    mod, home = upload_mod(ErrorFeedback(TopK(keep=0.5))), context()
    first = values(turned(mod, MODEL, home))["w"]
    again = values(turned(mod, MODEL, home, 2))["w"]
    assert first.tolist() == [4.0, -3.0, 0.0, 0.0]
    assert again.tolist() == [4.0, 0.0, 4.0, 0.0]  # what was kept back came to 2 + 2, above the other 3
    kept = tensors_of(home.state.array_records["secateur.upload"])["residual.w"]
    assert torch.equal(-kept, 2 * STEP["w"] - first - again)


def test_other_messages_and_errors_pass_untouched():
    mod, message = upload_mod(TopK()), asked(MODEL, kind="evaluate")
    reply = mod(message, context(), trains(STEP))
    assert torch.equal(values(reply)["w"], STEP["w"])
    failed = mod(asked(MODEL), context(), lambda given, _: Message(Error(1, "no data"), reply_to=given))
    assert failed.has_error() and failed.error.reason == "no data"


def test_noise_differs_unless_a_seed_is_given():
    def one(seed, home, number=1):
        return values(turned(upload_mod(GaussianNoise(1.0), seed=seed), MODEL, home, number))["w"]

    assert not torch.equal(one(None, context()), one(None, context()))
    assert torch.equal(one(3, context()), one(3, context()))
    assert not torch.equal(one(3, context()), one(3, context(partition=1)))
    assert not torch.equal(one(3, context()), one(3, context(), number=2))


@pytest.mark.parametrize("defense", [AlignedDualGradientPruning(), Soteria(), ErrorFeedback(Soteria())])
def test_what_a_mod_cannot_serve_is_refused(defense):
    with pytest.raises(WrongInput):
        upload_mod(defense)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"w": MODEL["w"]}, "bn.running_mean is missing"),
        (MODEL | {"w": MODEL["w"].to(torch.int8)}, "w is torch.int8"),  # integers are sent unchanged
        (MODEL | {"w": torch.full((4,), torch.nan)}, "not finite"),
        (MODEL | {"w": torch.zeros(5)}, r"w is torch.float32 \(5,\) instead of torch.float32 \(4,\)"),
    ],
)
def test_a_reply_of_a_wrong_kind_is_not_sent(reply, words):
    home = context()
    refused = upload_mod(ErrorFeedback(TopK()))(asked(MODEL), home, lambda message, _: answer(message, reply))
    assert refused.has_error() and re.search(words, refused.error.reason) and "nothing is sent" in refused.error.reason
    assert "secateur.upload" not in home.state  # its residual is untouched too


def never(message, home):
    raise AssertionError("trained")


@pytest.mark.parametrize(
    ("mod", "home", "words"),
    [
        (upload_mod(), context(), "secateur-defense: is not set"),
        (upload_mod(), context(run={"secateur-defense": ""}), "secateur-defense: is not set"),
        (upload_mod(), context(run={"secateur-defense": "dpg"}), "'dpg' is not known"),
        (upload_mod(), context(run={"secateur-defense": "dgp:k9=1"}), "k9"),
        (upload_mod(), context(run={"secateur-defense": "soteria"}), "needs the examples"),
        (upload_mod(), context(run={"secateur-defense": "ppb"}), "acts on loss"),
        (upload_mod(), context(run={"secateur-defense": "largest"}), "acts on client"),
        (upload_mod(), context(run={"secateur-defense": "none"}, secateur_defense="dgp"), "all must be equal"),
        (upload_mod("dgp"), context(run={"secateur-defense": "dgp:k1=0.1"}), "all must be equal"),
        (upload_mod("dgp"), context(secateur_key="/nowhere"), "secateur-key: cannot be read"),
    ],
)
def test_a_defense_that_cannot_be_applied_trains_and_sends_nothing(mod, home, words):
    refused = mod(asked(MODEL), home, never)
    assert refused.has_error() and words in refused.error.reason


def test_the_defense_comes_from_the_runs_config_at_the_first_message():
    mod, home = upload_mod(), context(run={"secateur-defense": "top-k:keep=0.5"}, secateur_defense="top-k:keep=.5")
    assert values(turned(mod, MODEL, home))["w"].tolist() == [4.0, -3.0, 0.0, 0.0]
    assert values(turned(upload_mod("top-k:keep=.5"), MODEL, context()))["w"].tolist() == [4.0, -3.0, 0.0, 0.0]
    assert values(turned(upload_mod("none"), MODEL, context()))["w"].tolist() == STEP["w"].tolist()


class Broken(TopK):
    """A defense whose exception shows the update."""

    def __call__(self, grads, state, context):
        raise RuntimeError(f"secret {grads}")


def test_an_exception_inside_a_defense_sends_nothing_and_shows_nothing():
    refused = turned(upload_mod(Broken()), MODEL, context())
    assert refused.error.reason == "nothing is sent: RuntimeError in the defense; see this client's log"


def linear(rows):
    return {"first.weight": rows, "first.bias": torch.zeros(len(rows)), "count": torch.tensor(0)}


HONEST = linear(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (HONEST | {"imprint": torch.zeros(3)}, "imprint is"),
        ({"first.weight": HONEST["first.weight"]}, "first.bias is missing"),
        (HONEST | {"first.weight": torch.zeros(16, 65)}, "shape|first.weight is"),
        (HONEST | {"first.weight": HONEST["first.weight"].double()}, "float64"),
        (HONEST | {"first.bias": torch.full((16,), torch.inf)}, "not finite"),
        (linear(HONEST["first.weight"][:1].expand(16, -1).clone()), "parallel rows"),
    ],
    ids=["more", "fewer", "shape", "type", "infinite", "imprint"],
)
@pytest.mark.parametrize("model", [None, HONEST], ids=["pinned", "own"])
def test_a_model_that_an_honest_server_does_not_send_is_not_trained(model, sent, words):
    mod, home = download_mod(model), context()
    honest = mod(asked(HONEST), home, trains(HONEST))
    assert not honest.has_error()
    for kind in ("train", "evaluate"):
        refused = mod(asked(sent, kind=kind), home, never)
        assert refused.has_error() and re.search(words, refused.error.reason) is not None, refused


def test_the_model_of_an_active_attack_is_not_trained():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    one = torch.ones(1, 1, 1)
    known = Knowledge(net, (1, 8, 8), 10, 0 * one, one)
    _, tampered = Rob().tamper(net, tree.state_of(net), known, torch.Generator().manual_seed(0))
    for mod in (download_mod(), download_mod(lambda: net)):
        assert mod(asked(tampered), context(), never).has_error()
        assert not mod(asked(tree.state_of(net)), context(), lambda message, _: answer(message, {})).has_error()
    assert "bytes" in download_mod(most_bytes=100)(asked(tampered), context(), never).error.reason


def big():
    made = torch.Generator().manual_seed(0)
    return {"w": torch.randn(50_000, generator=made), "b": torch.randn(10, generator=made)}


class NoGrid:
    """Two nodes."""

    def get_node_ids(self):
        return [7, 8]


def test_bytes_fall_on_the_wire_and_the_average_is_the_same():
    given, step = big(), {name: torch.randn_like(value) for name, value in big().items()}
    averages, sizes = [], []
    for wire in (False, True):
        strategy = DecodingStrategy(FedAvg()) if wire else FedAvg()
        mod = upload_mod(DualGradientPruning(), wire=wire)
        list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
        replies = [turned(mod, given, context(), step=step), turned(mod, given, context(1, 8), step=step)]
        sizes.append(sum(size_of(single_record(reply.content, "")[1]) for reply in replies))
        averages.append(tensors_of(strategy.aggregate_train(1, replies)[0]))
    assert sizes[1] < 0.25 * sizes[0]  # a fifth of the values, and their positions
    assert strategy.bytes_up == sizes[1] and strategy.dense_bytes == sizes[0]
    for name, value in averages[0].items():
        assert torch.allclose(value, averages[1][name], atol=1e-6)


@pytest.mark.parametrize("data", [b"", b"SCTR and nothing", np.zeros(3)])
def test_a_reply_that_cannot_be_read_is_left_out(data):
    given = big()
    strategy = DecodingStrategy(FedAvg())
    list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
    good = turned(upload_mod(TopK(), wire=True), given, context(), step=given)
    bad = turned(upload_mod(TopK(), wire=True), given, context(1, 8), step=given)
    array = Array(data) if isinstance(data, np.ndarray) else Array("uint8", (len(data),), "secateur", data)
    bad.content["arrays"] = ArrayRecord({"update": array})
    arrays, _ = strategy.aggregate_train(1, [good, bad])
    assert torch.allclose(tensors_of(arrays)["w"], values_of_top(given), atol=1e-6)


def bool_weight(sent, _):
    return sent | {"w": sent["w"] != 0}


def other_precision(sent, _):
    return sent | {"b": sent["b"].bfloat16()}


def not_a_number(sent, _):
    return sent | {"w": sent["w"].index_fill(0, torch.tensor([3]), torch.nan)}


def no_examples(sent, metrics):
    metrics["num-examples"] = 0
    return sent


def infinitely_many(sent, metrics):
    metrics["num-examples"] = float("inf")
    return sent


@pytest.mark.parametrize("harm", [bool_weight, other_precision, not_a_number, no_examples, infinitely_many])
def test_a_client_neither_ends_nor_poisons_a_round(harm):
    given = big()
    strategy = DecodingStrategy(FedAvg())
    list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
    good = turned(upload_mod(TopK(), wire=True), given, context(), step=given)
    bad = turned(upload_mod(TopK(), wire=True), given, context(1, 8), step=given)
    (metrics,) = bad.content.metric_records.values()
    sent = decode(unpack(single_record(bad.content, "")[1])["update"], {n: tuple(v.shape) for n, v in given.items()})
    bad.content["arrays"] = pack(update=encode(harm(sent, metrics)))
    arrays, _ = strategy.aggregate_train(1, [good, bad])
    assert torch.allclose(tensors_of(arrays)["w"], values_of_top(given), atol=1e-6)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"w": np.zeros(3, np.float32)},
        {"w": np.zeros(50_000), "b": np.zeros(10)},
        {"w": np.full(50_000, np.nan, np.float32), "b": np.zeros(10, np.float32)},
        {"w": Array("float32", (50_000,), "numpy.ndarray", b"\x93NUMPY"), "b": np.zeros(10, np.float32)},
        {"w": Array("float32", (50_000,), "numpy.ndarray", bytes(1 << 20)), "b": np.zeros(10, np.float32)},
    ],
    ids=["none", "shape", "precision", "nan", "cut", "large"],
)
def test_an_auditor_leaves_out_what_is_no_update(arrays):
    given, attacked = big(), []
    strategy = AuditedStrategy(FedAvg(), lambda *turn, stated: attacked.append(turn[1]), updates=2)
    list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
    good = turned(upload_mod(TopK()), given, context(), step=given)
    bad = turned(upload_mod(TopK()), given, context(1, 8), step=given)
    bad.content["arrays"] = ArrayRecord(
        {name: value if isinstance(value, Array) else Array(value) for name, value in arrays.items()}
    )
    with contextlib.suppress(Exception):  # the inner strategy is Flower's own
        strategy.aggregate_train(1, [bad, good])
    assert len(attacked) == 1


def values_of_top(given):
    sent, _ = TopK()({"w": -given["w"]}, {}, None)
    return given["w"] - sent["w"]


def test_an_auditor_attacks_updates_as_they_arrive_and_writes_a_page(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    inputs, rate = torch.rand(1, 1, 8, 8), 0.1
    truth = Batch(inputs, torch.tensor([2]))
    nn.functional.cross_entropy(net(inputs), truth.labels).backward()
    given = tree.params_of(net)
    step = {name: -rate * value.grad for name, value in net.named_parameters()}
    one = torch.ones(1, 1, 1)
    known = Knowledge(net, (1, 8, 8), 5, 0 * one, one, local_steps=1, learning_rate=rate)
    auditor = Auditor(known, "ig:tv=0.0001", tmp_path / "audit", iterations=300, seed=1, defense="dgp")
    strategy = AuditedStrategy(FedAvg(), auditor, every=2, truth=lambda number, reply: truth)
    for number in (1, 2):
        list(strategy.configure_train(number, arrays_of(given), ConfigRecord(), NoGrid()))
        replies = [turned(upload_mod(DualGradientPruning(0, 0)), given, context(), number, step)]
        assert strategy.aggregate_train(number, replies)[0] is not None
    rows = load_rows(tmp_path / "audit")
    assert {row.extra["round"] for row in rows} == {2} and {row.extra["client"] for row in rows} == {7}
    psnr = next(row.value for row in rows if row.metric == "psnr")
    assert psnr > 20, psnr
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "round 2" in page and "dgp was attacked plainly only" in page  # finding 2: it stood nowhere on this page
    assert "In 1 of 1 update the update is visibly not one of dgp" in page  # k1 = k2 = 0 leaves all entries
    idle = Auditor(known, "ig:tv=0.0001", tmp_path / "idle", iterations=1, defense="dgp:k1=0:k2=0")
    strategy = AuditedStrategy(FedAvg(), idle)  # without truth: the client's own statement says it
    list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
    strategy.aggregate_train(1, [turned(upload_mod(DualGradientPruning(0, 0)), given, context(), 1, step)])
    (verdict,) = judge_updates(load_rows(tmp_path / "idle"))
    assert "In 1 of 1 update dgp:k1=0:k2=0 changed nothing" in verdict.text
    assert "Missing: it was attacked plainly only" in verdict.text and verdict.text.split(". ")[1] in (
        tmp_path / "idle" / "report.html"
    ).read_text().replace("&#39;", "'")
    many = Auditor(known, ["ig", "ig-ats"], tmp_path, defense="mine")
    assert [str(attack) for attack in many.attacks] == [*(f"ig:tv={weight}" for weight in WEIGHTS), "ig-ats"]


def one_more_metric(metrics):
    metrics["loss"] = 0.5


def a_list(metrics):
    metrics["num-examples"] = [3, 4]


def no_weight(metrics):
    del metrics["num-examples"]


@pytest.mark.parametrize("harm", [one_more_metric, a_list, no_weight])
def test_metrics_of_another_form_do_not_end_a_round(harm):
    given = big()
    strategy = DecodingStrategy(FedAvg())
    list(strategy.configure_train(1, arrays_of(given), ConfigRecord(), NoGrid()))
    mod = upload_mod(TopK(), wire=True)
    replies = [turned(mod, given, context(i, 7 + i), step=given) for i in range(3)]
    (metrics,) = replies[0].content.metric_records.values()
    harm(metrics)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert torch.allclose(tensors_of(arrays)["w"], values_of_top(given), atol=1e-6)
