"""The layer-wise engine: all trials as one ordinary batch with frozen weights.

No trial's gradient of the whole network is ever built. Let f be the objective of dot = <g, g*>, trial = |g|^2 and
gap = |g - g*|^2. Its gradient by the pictures is that of <v, g> for a constant direction v = p g* + q g. Here
p = df/d dot - 2 df/d gap, and q = 2 df/d trial + 2 df/d gap.

A layer's g is bilinear in its inputs a and its outputs' gradient d. So v is carried back to a and d layer by layer,
outside of autograd. One backward pass from all a and d gives the gradient. Linear layers and convolutions take
|g|^2 and <g, g*> from inner products of rows where that is cheaper than g. This is the Gram trick:
|d^T a|^2 = <a a^T, d d^T>.

The engine works on a copy of the network whose layers note their inputs and outputs (`watch`).
`explain_unsupported` names the networks and problems for which this is impossible.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.nn import functional as F

from secateur.attacks.inversion.engines.layer_rules import (
    Algebra,
    ConvLayer,
    LinearLayer,
    MatchedLayer,
    NormLayer,
    Note,
    Tape,
    batchnorm_layer,
)
from secateur.attacks.inversion.problem import (
    Compared,
    Evaluate,
    Evaluated,
    Objective,
    Problem,
    Variables,
    expand_as,
    take_signs,
)
from secateur.errors import WrongInput
from secateur.interfaces import Params

LAYERS: dict[type[nn.Module], Callable[[Any, Tape], MatchedLayer]] = {
    nn.Linear: LinearLayer,
    nn.Conv2d: ConvLayer,
    nn.BatchNorm1d: batchnorm_layer,
    nn.BatchNorm2d: batchnorm_layer,
    nn.GroupNorm: NormLayer,
    nn.LayerNorm: NormLayer,
}
UNTRACED = "its forward cannot be traced"


class ObservedGradient(NamedTuple):
    """The observed gradient of one parameter, as its layer stores it, and the masks of `Problem`."""

    value: Tensor  # (N, ...)
    mask: Tensor | None
    unsigned: Tensor | None

    def take(self, rows: slice) -> ObservedGradient:
        """Return the aim of some of the trials."""
        return ObservedGradient(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


class ParameterPart(NamedTuple):
    """One parameter's share of the comparison, (N,) each, and the pull of v = p g* + q g back to its layer."""

    dot: Tensor
    trial: Tensor
    gap: Tensor | None
    pull: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]  # p, q -> the gradient by a, and by d as rows


def layerwise(problem: Problem, objective: Objective, chunk: int | None = None) -> Evaluate:
    """Return the evaluation of all trials as one batch, or of `chunk` at a time; refuse unsupported problems."""
    if reason := explain_unsupported(problem):
        raise WrongInput("engine", f"layerwise cannot be used: {reason}; allowed: plain, stacked")
    tape = Tape(wanted=objective.needs_statistics)
    net, layers = watch(problem, tape)
    batch = _Batch(problem, objective, net, tape, _aims(problem, layers))
    size = chunk or problem.trials

    def evaluate(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        starts = range(0, problem.trials, size)
        try:
            chunks = [batch.evaluate(slice(start, start + size), variables, labels, fixed) for start in starts]
        finally:
            tape.begin(0)  # the notes hold the memory of a whole pass
        if len(chunks) == 1:
            return chunks[0]
        totals, matchings, gradients = zip(*chunks, strict=True)
        joined = {name: torch.cat([gradient[name] for gradient in gradients]) for name in variables}
        return Evaluated(torch.cat(totals), torch.cat(matchings), joined)

    return evaluate


def explain_unsupported(problem: Problem) -> str | None:
    """Return the reason why the layer-wise engine cannot take a problem, or None where it can."""
    if problem.own_weights:
        return "every trial has weights of its own"
    if not problem.turn.is_gradient:
        return "local steps are unrolled"
    if problem.bounds is not None:
        return "the update shows bounds of the gradient"
    if problem.compression is not None:
        return "the trial's gradient is compressed"
    return _check_parameters(problem.net) or _check_calls(problem.net)


def _check_parameters(net: nn.Module) -> str | None:
    """Return the reason in the parameters: each must lie in exactly one known layer, without hooks."""
    seen: dict[int, str] = {}
    for name, value in net.named_parameters(remove_duplicate=False):
        owner = net.get_submodule(name.rpartition(".")[0])
        if type(owner) not in LAYERS:
            return f"the parameter {name} is in {type(owner).__name__}"
        if id(value) in seen:
            return f"the parameter {name} is also {seen[id(value)]}"
        seen[id(value)] = name
    for name, module in net.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"the module {name or 'itself'} has hooks"
    return None


def _check_calls(net: nn.Module) -> str | None:
    """Return the reason in a trace: every layer must be called once, and no parameter be used around its layer."""
    whole = nn.Sequential(net)
    try:
        nodes = fx.Tracer().trace(whole).nodes
    except Exception as error:
        return f"{UNTRACED} ({type(error).__name__})"
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    names = dict(whole.named_parameters())
    for node in nodes:
        if node.op == "get_attr" and node.target in names:
            return f"the parameter {str(node.target)[2:]} is used outside of its layer"
        if node.op == "call_method" and node.target == "view":
            return "its forward calls view, which refuses pictures that are channels_last"
        if node.op == "call_function" and node.target is F.batch_norm:
            return "its forward calls batch_norm, which would mix the trials"
    for name, module in whole.named_modules():
        if type(module) in LAYERS and calls[name] != 1:
            return f"the layer {name[2:] or 'itself'} is called {calls[name]} times"
    return None


def watch(problem: Problem, tape: Tape) -> tuple[nn.Module, dict[str, MatchedLayer]]:
    """Return a copy with the sent tensors, frozen and channels_last, and its layers by name; spare the original."""
    net = copy.deepcopy(problem.net)
    layers = {}
    for name, module in net.named_modules():
        prefix = f"{name}." if name else ""
        for key in module._parameters:
            if prefix + key in problem.sent:
                value = problem.sent[prefix + key].detach()
                module._parameters[key] = nn.Parameter(value.contiguous(memory_format=layout(value)), False)
        for key in module._buffers:
            if prefix + key in problem.sent:
                module._buffers[key] = problem.sent[prefix + key].detach()
        if type(module) in LAYERS:
            layers[name] = LAYERS[type(module)](module, tape)
            module.forward = layers[name].forward
    return net, layers


def layout(x: Tensor) -> torch.memory_format:
    """Return the memory format of tensors of this shape."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format


def _aims(problem: Problem, layers: dict[str, MatchedLayer]) -> dict[MatchedLayer, dict[str, ObservedGradient]]:
    """Return the observed gradient of each layer's weight and bias."""
    aims: dict[MatchedLayer, dict[str, ObservedGradient]] = {layer: {} for layer in layers.values()}
    for name, value in problem.observed.items():
        owner, _, key = name.rpartition(".")
        layer = layers[owner]
        stored = layer.reshape_weight if key == "weight" else lambda bias: bias.flatten(1)
        masks = [stored(part[name]) if part and name in part else None for part in (problem.mask, problem.unsigned)]
        aims[layer][key] = ObservedGradient(stored(value), *masks)
    return aims


class _Batch:
    """The watched network and the observed gradients in its layers' shapes."""

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        net: nn.Module,
        tape: Tape,
        aims: dict[MatchedLayer, dict[str, ObservedGradient]],
    ) -> None:
        self.problem, self.objective, self.net, self.tape, self.aims = problem, objective, net, tape, aims
        sizes = [aim.value.flatten(1).square().sum(1) for of in aims.values() for aim in of.values()]
        self.observed = torch.stack(sizes).sum(0)  # |g*|^2

    def evaluate(self, rows: slice, variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        """Evaluate the trials `rows`."""
        leaves = {name: value[rows].detach().requires_grad_() for name, value in variables.items()}
        chosen = leaves["labels"].softmax(-1) if labels is None else labels[rows]
        with torch.enable_grad():
            notes, slopes = self._pass(leaves["inputs"], chosen)
        with torch.no_grad():
            parts = [self._parts(note, d, rows) for note, d in zip(notes, slopes, strict=True)]
        compared = self._compare([part for of in parts for part in of], rows)
        with torch.enable_grad():
            here = {name: value[rows] for name, value in fixed.items()}
            total, matching = self.objective(compared, leaves, here)
        p, q, of_statistics, direct = _partials(total, compared, leaves)
        ends, cotangents = self._ends(notes, slopes, parts, p, q)
        ends += [value for pair in self.tape.statistics for value in pair]
        cotangents += of_statistics
        pulled = torch.autograd.grad(ends, list(leaves.values()), cotangents, allow_unused=True)
        gradient = {
            name: one if other is None else one + other
            for (name, one), other in zip(direct.items(), pulled, strict=True)
        }
        return Evaluated(total.detach(), matching.detach(), gradient)

    def _pass(self, inputs: Tensor, labels: Tensor) -> tuple[list[Note], Sequence[Tensor]]:
        """Return every matched layer's note, and the gradient of the trials' losses by its outputs."""
        trials = len(inputs)
        self.tape.begin(trials)
        pictures = inputs.flatten(0, 1)
        outputs = self.net(pictures.contiguous(memory_format=layout(pictures)))
        notes = [note for note in self.tape.notes if self.aims[note.layer]]
        loss = _sum_losses(self.problem, outputs.unflatten(0, (trials, -1)), labels)
        return notes, torch.autograd.grad(loss, [note.output for note in notes], create_graph=True)

    def _parts(self, note: Note, d: Tensor, rows: slice) -> list[ParameterPart]:
        """Return the parts of a layer's weight and bias."""
        aims = {key: aim.take(rows) for key, aim in self.aims[note.layer].items()}
        layer, trials, gap = note.layer, self.tape.trials, self.objective.needs_gap
        parts = []
        if "weight" in aims:
            parts.append(weight_part(layer.algebra(note.inputs, d, trials), aims["weight"], gap))
        if "bias" in aims:
            parts.append(bias_part(layer.rows(d, trials), aims["bias"], gap))
        return parts

    def _compare(self, parts: Sequence[ParameterPart], rows: slice) -> Compared:
        """Return the sums over all parameters, as leaves for the objective's derivatives."""
        dot, trial = (torch.stack(values).sum(0).requires_grad_() for values in list(zip(*parts, strict=True))[:2])
        gaps = [part.gap for part in parts if part.gap is not None]
        gap = torch.stack(gaps).sum(0).requires_grad_() if gaps else None
        statistics = [(m.detach().requires_grad_(), v.detach().requires_grad_()) for m, v in self.tape.statistics]
        return Compared(dot, trial, self.observed[rows], gap, statistics)

    @torch.no_grad()
    def _ends(
        self,
        notes: Sequence[Note],
        slopes: Sequence[Tensor],
        parts: Sequence[list[ParameterPart]],
        p: Tensor,
        q: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the layers' inputs and slopes as ends of v's pull, each with the gradient of <v, g> by it."""
        ends, cotangents = [], []
        for note, d, of in zip(notes, slopes, parts, strict=True):
            pulled = [part.pull(p, q) for part in of]
            by_d = pulled[0][1] if len(pulled) == 1 else pulled[0][1] + pulled[1][1]
            if d.requires_grad:
                ends.append(d)
                cotangents.append(note.layer.from_rows(by_d, d))
            if pulled[0][0] is not None:
                ends.append(note.inputs)
                cotangents.append(pulled[0][0])
        return ends, cotangents


def _sum_losses(problem: Problem, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the trials' losses."""
    if problem.loss is F.cross_entropy:
        whole = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(0, 1), reduction="sum")
        return whole / outputs.shape[1]
    losses: Tensor = vmap(problem.loss)(outputs, labels)
    return losses.sum()


def weight_part(algebra: Algebra, aim: ObservedGradient, needs_gap: bool) -> ParameterPart:
    """Compare by inner products of rows where they suffice and are cheaper, by the gradient itself elsewhere."""
    if algebra.rows is not None and aim.mask is None and aim.unsigned is None and not needs_gap:
        a, d, unrows = algebra.rows
        inputs, outputs = a.shape[2], d.shape[2]
        if 2 * a.shape[1] * (inputs + outputs) < inputs * outputs:  # the rest of the work is the same
            return _compare_products(a, d, unrows, aim.value)
    return _compare_gradient(algebra.gradient(), aim, needs_gap, lambda v: (algebra.back(v), algebra.along(v)))


def bias_part(rows: Tensor, aim: ObservedGradient, needs_gap: bool) -> ParameterPart:
    """Compare the bias gradient: the sum of d over the positions (`rows`)."""
    return _compare_gradient(rows.sum(1), aim, needs_gap, lambda v: (None, v[:, None].expand_as(rows)))


def _compare_gradient(
    gradient: Tensor, aim: ObservedGradient, needs_gap: bool, carry: Callable[[Tensor], tuple[Tensor | None, Tensor]]
) -> ParameterPart:
    """Compare a gradient that was built; `carry` takes a direction to the layer's inputs and outputs."""
    mask, value = aim.mask, take_signs(aim.value, gradient, aim.unsigned)
    g = gradient if mask is None else gradient * mask

    def pull(p: Tensor, q: Tensor) -> tuple[Tensor | None, Tensor]:
        v = torch.addcmul(expand_as(p, g) * value, expand_as(q, g), g)
        return carry(v if mask is None else v * mask)

    return ParameterPart(_sum(g * value), _sum(g.square()), _sum((g - value).square()) if needs_gap else None, pull)


def _compare_products(a: Tensor, d: Tensor, unrows: Callable[[Tensor], Tensor], aim: Tensor) -> ParameterPart:
    """Compare without the gradient: <d^T a, g*> = <d, a g*^T> and |d^T a|^2 = <a a^T, d d^T>."""
    aimed = torch.bmm(a, aim.mT)
    of_a, of_d = torch.bmm(a, a.mT), torch.bmm(d, d.mT)

    def pull(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        p, q = expand_as(p, a), expand_as(q, a)
        by_a = torch.baddbmm(torch.bmm(p * d, aim), q * of_d, a)
        return unrows(by_a), torch.baddbmm(p * aimed, q * of_a, d)

    return ParameterPart(_sum(aimed * d), _sum(of_a * of_d), None, pull)


def _sum(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


def _partials(
    total: Tensor, compared: Compared, leaves: Variables
) -> tuple[Tensor, Tensor, list[Tensor], dict[str, Tensor]]:
    """Return the direction's p and q, and the objective's gradients by the statistics and by the variables directly."""
    gap = [] if compared.gap is None else [compared.gap]
    statistics = [value for pair in compared.statistics for value in pair]
    by = [compared.dot, compared.trial, *gap, *statistics, *leaves.values()]
    grads = torch.autograd.grad(total.sum(), by, allow_unused=True, materialize_grads=True)
    dot, trial, *rest = grads
    if gap:
        dot, trial, rest = dot - 2 * rest[0], trial + rest[0], rest[1:]
    direct = dict(zip(leaves, rest[len(statistics) :], strict=True))
    return dot, 2 * trial, list(rest[: len(statistics)]), direct
