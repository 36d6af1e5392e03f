"""Distributed differential privacy: clipped updates, shares of noise, and the epsilon of their sum."""

import pytest
import torch

from secateur.config import defense
from secateur.defenses.distributed_dp import DistributedPrivacy
from secateur.defenses.dp_common import Phase, epsilon
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.interfaces import Batch, UploadContext
from tiny_rules import Stale, bn_net, federation, run

NOTHING = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64))
ONE = LocalTraining(1, None, 4, 0.1)


def sent(upload, grads, seed=0):
    context = UploadContext(torch.nn.Identity(), {}, NOTHING, 1, torch.Generator().manual_seed(seed))
    return upload(grads, {}, context)[0]


def test_an_update_is_clipped_as_a_whole_and_a_small_one_is_not():
    exact = DistributedPrivacy(noise_multiplier=0, max_norm=1.0)
    large = sent(exact, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])})
    assert large["a"].tolist() == pytest.approx([0.6, 0.0]) and large["b"].tolist() == [[pytest.approx(0.8)]]
    assert sent(exact, {"a": torch.tensor([0.3, 0.4])})["a"].tolist() == pytest.approx([0.3, 0.4])
    assert sent(exact, {"a": torch.zeros(2)})["a"].tolist() == [0.0, 0.0]


def test_the_sum_of_all_shares_has_the_noise_that_was_promised():
    upload, zeros = DistributedPrivacy(noise_multiplier=2.0, max_norm=0.5, clients=16), {"a": torch.zeros(20_000)}
    total = sum(sent(upload, zeros, seed)["a"] for seed in range(16))
    assert float(total.std()) == pytest.approx(1.0, rel=0.03)  # 2 * 0.5


def test_the_epsilon_is_that_of_the_noise_in_the_smallest_sum():
    upload = DistributedPrivacy(noise_multiplier=2.0, clients=16)
    assert upload.guarantee(3, 16).epsilon == pytest.approx(epsilon(2.0, [Phase(1.0, 3)], 1e-5))
    assert upload.guarantee(3, 20).epsilon == upload.guarantee(3, 16).epsilon  # more noise than was promised
    assert upload.guarantee(3, 4).epsilon == pytest.approx(epsilon(1.0, [Phase(1.0, 3)], 1e-5))
    assert upload.guarantee(3, 16, weights=0.5).epsilon == pytest.approx(epsilon(1.0, [Phase(1.0, 3)], 1e-5))
    assert "sum of at least 4 honest clients" in str(upload.guarantee(3, 4))


@pytest.mark.parametrize("view, answered", [("sum", 2), ("update", 1)])
def test_a_federation_counts_who_answered_and_says_whom_the_server_sees(view, answered):
    upload = DistributedPrivacy(noise_multiplier=3.0, clients=3)
    fed = federation(local=ONE, upload=upload, view=view, averaging="uniform", faults=Faults(drop_out=0.3))
    rows = [row for row in run(fed) if row.metric == "epsilon" and row.round == 4]
    assert fed.ledger.least == 2
    turns = max(fed.ledger.turns.values())
    assert rows[0].value == pytest.approx(upload.guarantee(turns, answered).epsilon)
    assert ("the sum of at least 2" if view == "sum" else "each update alone") in rows[0].note


def test_what_no_epsilon_covers_is_not_sent():
    fed = federation(bn_net(), local=ONE, upload=DistributedPrivacy())
    drawn = fed.sampler(1)
    assert all(not update.buffers for *_, update in fed._updates(1, drawn, {}))
    with pytest.raises(WrongInput, match="no epsilon covers"):
        federation(local=ONE, upload=DistributedPrivacy(), base=Stale())
    with pytest.raises(WrongInput, match="the noise cancels over the rounds"):
        upload_of(defense("distributed-dp+error-feedback"))
