"""With whom an example is scored: under static BatchNorm its loss depends on its batch mates (mapp_fl 5.2).

mixed   everyone asked about, and everyone known, shuffled together, in batches of one size: the rule
apart   members in batches of their own, non-members in theirs: the statistics of a batch then tell membership
fixed   every example by itself, normalised by statistics that were estimated on the attacker's own data
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.errors import NotFinite, unknown
from secateur.functional import Functional, split
from secateur.gpu.precision import full_precision
from secateur.inference import answering
from secateur.interfaces import Params

RULES = ("mixed", "apart", "fixed")
SIZE = 128  # of a scoring batch: that of training
AT_ONCE = 16  # batches that are stacked on a GPU

Answer = Callable[[Tensor], Tensor]  # inputs -> (N, K) probabilities, in batches of one size


def scorer(
    net: nn.Module, state: Params, device: torch.device | str, size: int = SIZE, stacked: bool | None = None
) -> Answer:
    """A model that answers in batches of exactly `size`, in the order given: the last is filled up by those before.

    `stacked` asks about many batches at once, each by its own statistics; None: on a GPU.
    """
    device = torch.device(device)
    answer = answering(net, state, device, size)
    if device.type == "cuda" if stacked is None else stacked:
        answer = _stacked(net, state, device, size)

    def probabilities(inputs: Tensor) -> Tensor:
        rest = len(inputs) % size
        if rest == 0 or len(inputs) < size:
            return answer(inputs).softmax(1)
        last = answer(inputs[-size:])[-rest:]
        return torch.cat([answer(inputs[:-rest]), last]).softmax(1)

    return probabilities


def _stacked(net: nn.Module, state: Params, device: torch.device, size: int) -> Answer:
    """Logits of many batches at once: launching the kernels of each takes longer than they run."""
    function = Functional(net, training=False, device=device)
    params, others = split(net, tree.to(state, device))
    tensors = params | others

    @torch.no_grad()
    def answer(inputs: Tensor) -> Tensor:
        batches = inputs.reshape(-1, min(size, len(inputs)), *inputs.shape[1:])
        each = vmap(lambda part: function(tensors, part))
        with full_precision(device):
            given = torch.cat([each(some) for some in torch.split(batches, AT_ONCE)]).flatten(0, 1)
        if not given.isfinite().all():
            raise NotFinite
        return given

    return answer


def mixing(answer: Answer, rng: Generator) -> Answer:
    """The same, shuffled first: whoever is asked about together is mixed."""

    def mixed(inputs: Tensor) -> Tensor:
        order = torch.randperm(len(inputs), generator=rng).to(inputs.device)
        return answer(inputs[order])[order.argsort()]

    return mixed


def together(answer: Answer, parts: Sequence[Tensor], rule: str, rng: Generator) -> list[Tensor]:
    """(n, K) probabilities of each part under a rule: parts are mixed, or answered apart (also where it is `fixed`)."""
    if rule not in RULES:
        raise unknown("batches", rule, RULES)
    if rule != "mixed":
        return [answer(part) for part in parts]
    found = mixing(answer, rng)(torch.cat(list(parts)))
    return list(found.split_with_sizes([len(part) for part in parts]))


def is_static(net: nn.Module) -> bool:
    """Whether a network normalises by the batch's own statistics when it is asked."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in net.modules())


@torch.no_grad()
def settled(net: nn.Module, state: Params, reference: Tensor, size: int = SIZE) -> tuple[nn.Module, Params]:
    """The network with statistics that stay: the means over batches of `reference` (as HeteroFL estimates them)."""
    made = copy.deepcopy(net).to(reference.device)
    made.load_state_dict(dict(state))
    for name, module in list(made.named_modules()):
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            new = type(module)(module.num_features, module.eps, momentum=cast(float, None), affine=module.affine)
            new.load_state_dict(module.state_dict(), strict=False)
            parent, _, own = name.rpartition(".")
            setattr(made.get_submodule(parent), own, new.to(reference))
    made.train()
    whole = len(reference) // size * size or len(reference)
    for part in torch.split(reference[:whole], size):
        made(part)
    return made.eval(), tree.state_of(made)
