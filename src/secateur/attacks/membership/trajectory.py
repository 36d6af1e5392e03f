"""LiRA on a client's rounds: how unlikely are its models' answers, if the round's other clients' are what is likely?

No shadow model is trained: the other clients of a round began at the same model as the client that is asked about, and
never had the candidates, so theirs are the "out" models (after Carlini et al. 2022, offline). Of a candidate x

    phi_t(x)   the log odds of its label under the client's model of round t
    mu_t(x)    their mean under the models of the round's M_t others
    s(x)       the others' deviation about mu_t(x), pooled over the rounds: of x itself where it rests on 64 values or
               more, else one for all candidates
    score(x)   the mean over the rounds of -log Pr[Z > z_t(x)], z_t = (phi_t - mu_t) / (s sqrt(1 + 1 / M_t)), Z normal

The root stands for what M_t values leave open of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import log_ndtr

from secateur.attacks.membership.lira import MANY, NARROWEST


class Observed(NamedTuple):
    """One round of a client: the log odds of all candidates."""

    own: Tensor  # (N,) under the client's model
    others: Tensor  # (M, N) under those of the round's other clients


def scores(rounds: Sequence[Observed]) -> Tensor | None:
    """(N,) high = member; None where the others are too few for a deviation: no round has two of them."""
    freedom = sum(len(each.others) - 1 for each in rounds if len(each.others))
    if freedom < 1:
        return None
    known = [each for each in rounds if len(each.others)]
    means = [each.others.mean(0) for each in known]
    squares = torch.stack([(o.others - mean).square().sum(0) for o, mean in zip(known, means, strict=True)]).sum(0)
    if freedom < MANY:
        squares = squares.mean(0, keepdim=True)
    scale = (squares / freedom).sqrt().clamp_min(NARROWEST)
    found = []
    for each, mean in zip(known, means, strict=True):
        open_share = (1 + 1 / len(each.others)) ** 0.5
        tail: Tensor = log_ndtr((mean - each.own) / (scale * open_share))
        found.append(-tail)
    return torch.stack(found).mean(0)
