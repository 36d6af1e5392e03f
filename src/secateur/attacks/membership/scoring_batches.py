"""Batches for scoring: under static BatchNorm the loss of an example depends on its batch (mapp_fl 5.2).

mixed   all candidates and known examples shuffled together, in batches of one size (the default rule)
apart   members and non-members in separate batches, so that the statistics of a batch reveal membership
fixed   each example independently, normalised by statistics estimated on the attacker's own data
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
from secateur.inference import bind_state
from secateur.interfaces import Params

RULES = ("mixed", "apart", "fixed")
SIZE = 128  # of a scoring batch: as in training
AT_ONCE = 16  # number of batches stacked on a GPU

Answer = Callable[[Tensor], Tensor]  # inputs -> (N, K) probabilities, in batches of one size


def scorer(
    net: nn.Module, state: Params, device: torch.device | str, size: int = SIZE, stacked: bool | None = None
) -> Answer:
    """Return a function that answers in batches of exactly `size`, in order of the inputs.

    The last batch is filled up with the inputs before it. `stacked` evaluates many batches at once, each with its own
    statistics; None: only on a GPU.
    """
    device = torch.device(device)
    answer = bind_state(net, state, device, size)
    if device.type == "cuda" if stacked is None else stacked:
        answer = _stack_batches(net, state, device, size)

    def probabilities(inputs: Tensor) -> Tensor:
        rest = len(inputs) % size
        if rest == 0 or len(inputs) < size:
            return answer(inputs).softmax(1)
        last = answer(inputs[-size:])[-rest:]
        return torch.cat([answer(inputs[:-rest]), last]).softmax(1)

    return probabilities


def _stack_batches(net: nn.Module, state: Params, device: torch.device, size: int) -> Answer:
    """Return a function for the logits of many batches at once: launches of single batches would dominate the time."""
    function = Functional(net, training=False, device=device)
    params, others = split(net, tree.to(state, device))
    tensors = params | others

    @torch.no_grad()
    def answer(inputs: Tensor) -> Tensor:
        batches = inputs.reshape(-1, min(size, len(inputs)), *inputs.shape[1:])
        forward = vmap(lambda part: function(tensors, part))
        with full_precision(device):
            logits = torch.cat([forward(stack) for stack in torch.split(batches, AT_ONCE)]).flatten(0, 1)
        if not logits.isfinite().all():
            raise NotFinite
        return logits

    return answer


def shuffle_inputs(answer: Answer, rng: Generator) -> Answer:
    """Return `answer` with shuffled inputs, so that all examples of a call are mixed; the output order is unchanged."""

    def answer_shuffled(inputs: Tensor) -> Tensor:
        order = torch.randperm(len(inputs), generator=rng).to(inputs.device)
        return answer(inputs[order])[order.argsort()]

    return answer_shuffled


def answer_parts(answer: Answer, parts: Sequence[Tensor], rule: str, rng: Generator) -> list[Tensor]:
    """Return the probabilities (n, K) of each part: parts are mixed by the rule `mixed`, else answered separately."""
    if rule not in RULES:
        raise unknown("batches", rule, RULES)
    if rule != "mixed":
        return [answer(part) for part in parts]
    answers = shuffle_inputs(answer, rng)(torch.cat(list(parts)))
    return list(answers.split_with_sizes([len(part) for part in parts]))


def is_static(net: nn.Module) -> bool:
    """Return True if a network normalises by batch statistics in eval mode (static BatchNorm)."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in net.modules())


@torch.no_grad()
def fix_statistics(net: nn.Module, state: Params, reference: Tensor, size: int = SIZE) -> tuple[nn.Module, Params]:
    """Return the network with fixed statistics, the means over batches of `reference` (as HeteroFL estimates them)."""
    fixed = copy.deepcopy(net).to(reference.device)
    fixed.load_state_dict(dict(state))
    for name, module in list(fixed.named_modules()):
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            new = type(module)(module.num_features, module.eps, momentum=cast(float, None), affine=module.affine)
            new.load_state_dict(module.state_dict(), strict=False)
            parent, _, child = name.rpartition(".")
            setattr(fixed.get_submodule(parent), child, new.to(reference))
    fixed.train()
    rows = len(reference) // size * size or len(reference)  # full batches only, if there are any
    for part in torch.split(reference[:rows], size):
        fixed(part)
    return fixed.eval(), tree.state_of(fixed)
