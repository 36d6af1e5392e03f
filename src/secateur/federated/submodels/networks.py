"""Networks of a client's width: their construction, their function of a flat vector, and their evaluation.

A narrow network has static BatchNorm and the Scaler (HeteroFL; mapp_fl Section 7). A chain of supported layers is also
a function of many flat vectors: stacked clients of one width, without vmap.

A federation is evaluated on examples that no client has. BatchNorm is static, or its statistics are re-estimated
(HeteroFL's sBN). Under static BatchNorm a prediction depends on its batch, so the rule is explicit. Batches are
consecutive, of a given size, in the order of the examples. A last batch of a single row joins the one before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn, vmap
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.data.dataset import fingerprint
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.rules import HeteroFL
from secateur.federated.submodels.structure import ClientAndRound, Structure, SubmodelIndex, params_of
from secateur.federated.traffic import Measure
from secateur.functional import Ask, Functional
from secateur.gpu.precision import full_precision
from secateur.gpu.stacked_layers import conv2d, linear, norm_relu, norm_relu_pool
from secateur.inference import to_channels_last
from secateur.interfaces import Batch, Params
from secateur.models.create import check
from secateur.models.mapp import Scaler
from secateur.pruning.channels import NORMS
from secateur.pruning.removal import shrink_layer, shrink_norm

Step = Callable[[Tensor, Iterator[Tensor]], Tensor]  # (inputs, remaining parameters) -> outputs


class Narrow:
    """The model of one width, as a function of its flat vector."""

    def __init__(self, net: nn.Module, rate: float, scaler: bool, device: torch.device) -> None:
        self.net, self.rate = net, rate
        self.key = f"{rate}, {scaler}, {fingerprint(*net.buffers())}: {net}"  # equal for equal functions
        self.shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        self.others = {name: value.to(device) for name, value in net.named_buffers()}
        self.function = Functional(net, training=True, device=device)
        self.chain = Chain(net) if fits(net) else None
        self._asks: dict[int, list[Ask]] = {}
        self._quiet = False  # True once the network is known to draw nothing

    def loss(self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, *noise: Tensor) -> Tensor:
        """Return the cross-entropy; the logits of labels that a client does not own count as 0 (HeteroFL)."""
        logits = self.function(params_of(flat, self.shapes) | self.others, inputs, noise)
        return cross_entropy(logits if owned is None else logits * owned, labels)

    def losses(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, noise: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the loss of each of many clients, (lanes,); every argument has the lanes first."""
        if self.chain is None:
            inputs = inputs.contiguous()  # a single channels_last lane breaks BatchNorm under vmap
            lanes = (0, 0, 0, None if owned is None else 0, *(0 for _ in noise))
            return vmap(self.loss, in_dims=lanes)(flat, inputs, labels, owned, *noise)
        logits = self.chain(flat, inputs)
        logits = logits if owned is None else logits * owned[:, None]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)

    def noise(self, flat: Tensor, data: Tensor, size: int, rng: Generator) -> tuple[Tensor, ...]:
        """Return the network's random draws for a batch of `size` rows of the data."""
        if self._quiet:
            return ()
        if size not in self._asks:
            asks = self.function.asks(params_of(flat, self.shapes) | self.others, data[[0] * size])
            self._asks[size], self._quiet = asks, not asks
        return tuple(ask.draw(rng) for ask in self._asks[size])


def without_statistics(net: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorms always use the batch's statistics, and keep none."""
    copied = copy.deepcopy(net)
    for module in copied.modules():
        if isinstance(module, NORMS):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return copied


def build_narrow(
    net: nn.Module, structure: Structure, rate: float, scaler: bool, input_shape: tuple[int, ...], classes: int
) -> nn.Module:
    """Return the network of a client that keeps this share of the channels; its weights mean nothing."""
    narrow = copy.deepcopy(net)
    if rate == 1:
        return narrow
    cut = structure.cut(HeteroFL(), ClientAndRound(0, 1, 1), rate)  # any rule's sub-models have this structure
    for name, layer in structure.layers.items():
        outputs, inputs = (torch.zeros(len(flags), dtype=torch.bool) for flags in layer)
        outputs[cut.channels[name]] = True
        inputs[cut.inputs(name, len(inputs))] = True
        shrink_layer(narrow, name, outputs, inputs)
    for name, places in structure.norms.items():
        kept = torch.zeros(len(places), dtype=torch.bool)
        kept[cut.channels[name]] = True
        shrink_norm(narrow, name, kept)
    _scale(narrow, rate, scaler, [name for name in structure.layers if name not in structure.outputs])
    check(narrow, input_shape, classes)
    return narrow


def _scale(net: nn.Module, rate: float, scaler: bool, layers: list[str]) -> None:
    """Divide the outputs of hidden layers by the share of channels kept (mapp_fl Eq. 9), in the network's own Scalers.

    A network without a Scaler gets a hook on each hidden layer instead.
    """
    scalers = [module for module in net.modules() if isinstance(module, Scaler)]
    for module in scalers:
        module.rate = rate if scaler else 1.0
    for name in layers if scaler and not scalers else ():
        net.get_submodule(name).register_forward_hook(partial(_divide, rate))


def _divide(rate: float, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    return outputs / rate


class Chain:
    """The layers of a network for which `fits` is True."""

    def __init__(self, net: nn.Module) -> None:
        self.steps = list(_steps(_layers(net)))
        self.shapes = [tuple(value.shape) for value in net.parameters()]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    def __call__(self, flat: Tensor, inputs: Tensor) -> Tensor:
        """Return outputs (lanes, B, classes) of flat parameters (lanes, P) and inputs (lanes, B, ...)."""
        parts = flat.split_with_sizes(self.sizes, 1)  # one gradient in all; slices would each have a full-size gradient
        parameters = iter([part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)])
        x = inputs.flatten(0, 1)
        for step in self.steps:
            x = step(x, parameters)
        return x.view(len(flat), -1, *x.shape[1:])


def _steps(layers: Sequence[nn.Module]) -> Iterator[Step]:
    """Yield one step a layer; a convolution includes the scaler after it, and BatchNorm the ReLU and a pooling."""
    rest = list(layers)
    while rest:
        layer = rest.pop(0)
        match layer:
            case nn.Conv2d():
                scaler = rest.pop(0) if rest and isinstance(rest[0], Scaler) else None
                rate = scaler.rate if isinstance(scaler, Scaler) else 1.0
                yield partial(_conv2d, rate, bool(rest) and isinstance(rest[0], nn.BatchNorm2d))
            case nn.BatchNorm2d():
                rest.pop(0)
                pools = bool(rest) and isinstance(rest[0], nn.MaxPool2d)
                rest = rest[pools:]
                yield partial(_norm, norm_relu_pool if pools else norm_relu, layer.eps)
            case nn.Linear():
                yield lambda x, parameters: linear(x, next(parameters), next(parameters))
            case _:
                yield partial(_apply_layer, layer)


def _conv2d(rate: float, normed: bool, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    weight, bias = next(parameters), next(parameters)
    bias = bias.detach() if normed else bias  # BatchNorm cancels the bias, so its gradient would be round-off
    return conv2d(x, weight, bias) if rate == 1 else conv2d(x, weight / rate, bias / rate)


def _norm(layer: Callable[..., Tensor], eps: float, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    return layer(x, next(parameters), next(parameters), eps)


def _apply_layer(layer: nn.Module, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    outputs: Tensor = layer(x)
    return outputs


def fits(net: nn.Module) -> bool:
    """Return True if the network is a sequence of supported layers."""
    layers = _layers(net)
    weighty = [layer for layer in layers if [*layer.parameters()]]
    once = len(weighty) == len(set(weighty))  # a layer that occurs twice has its parameters only once
    return once and not any(map(_has_hooks, net.modules())) and all(map(_is_known, layers, [*layers[1:], None]))


def _layers(net: nn.Module) -> list[nn.Module]:
    """Return the layers of nested sequences, in order."""
    return [layer for module in net for layer in _layers(module)] if type(net) is nn.Sequential else [net]


def _has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks on its inputs or outputs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _is_known(layer: nn.Module, after: nn.Module | None) -> bool:
    if type(layer) is nn.Conv2d:
        odd = all(size % 2 for size in layer.kernel_size)
        same = layer.padding in ("same", tuple(size // 2 for size in layer.kernel_size)) and odd
        plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
        return same and plain and layer.bias is not None
    if type(layer) is nn.BatchNorm2d:
        plain = layer.affine and layer.bias is not None and not layer.track_running_stats
        return plain and type(after) is nn.ReLU
    if type(layer) is nn.Linear:
        return layer.bias is not None
    if type(layer) is nn.MaxPool2d:
        settings = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices
        return settings == (2, 2, 0, 1, False, False)
    if type(layer) is nn.Flatten:
        return layer.start_dim == 1
    return type(layer) in (nn.ReLU, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.Identity, Scaler)


def batches(rows: Tensor, size: int) -> list[Tensor]:
    """Return full batches, then the rest; a single row joins the batch before, as BatchNorm cannot normalise it.

    Example:
        >>> [len(batch) for batch in batches(torch.arange(7), 3)]
        [3, 4]
    """
    parts = list(torch.split(rows, size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


class SubmodelEvaluation:
    """Accuracy and loss of the server's model and of every client's."""

    def __init__(self, train: Batch, test: Batch, terms: SubmodelSpec) -> None:
        self.train, self.test, self.terms = train, test, terms

    def __call__(self, narrow: Narrow, flat: Tensor, shares: Sequence[Tensor]) -> dict[str, float]:
        """Return the scores of one model; BatchNorm's statistics are re-estimated on the rows `shares`."""
        if not self.test.size:
            return {}
        terms, params = self.terms, params_of(flat, narrow.shapes) | narrow.others
        if terms.batchnorm == "static":
            outputs = logits(narrow.net, params, self.test.inputs, terms.test_batch)
        else:
            examples = self.train.inputs[torch.cat([*shares]).to(self.train.inputs.device)]
            outputs = predict_reestimated(narrow.net, params, examples, self.test.inputs, terms.test_batch)
        return score_outputs(outputs, self.test.labels)

    def clients(self, number: int, received: Callable[[int], tuple[Narrow, SubmodelIndex, Tensor]]) -> list[Measure]:
        """Return the measures of the models that clients begin the round with; equal models are tested once.

        Args:
            number: the round.
            received: returns a client's width, its channels and the model at its start.
        """
        measures: list[Measure] = []
        tested: dict[int, tuple[SubmodelIndex, dict[str, float]]] = {}
        shared = self.terms.batchnorm == "static" and self.terms.withholding is None
        for client, rows in enumerate(self.terms.shares):
            narrow, cut, flat = received(client)
            form = id(cut) if shared else client
            if form not in tested:
                tested[form] = cut, self(narrow, flat, [rows])
            sized = {"parameters": float(len(flat)), "client_rows": float(len(rows))}
            measures += [Measure(name, value, number, client) for name, value in (tested[form][1] | sized).items()]
        return measures + mean_of(measures, number)


def mean_of(measures: Sequence[Measure], number: int) -> list[Measure]:
    """Return the clients' mean accuracy."""
    values = [measure.value for measure in measures if measure.metric == "test_accuracy" and measure.client is not None]
    note = "the mean over all clients of the model that they began the round with"
    return [Measure("client_accuracy", sum(values) / len(values), number, note=note)] if values else []


def score_outputs(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return accuracy and loss; outputs that are not finite have accuracy 0 and no loss."""
    if not bool(outputs.isfinite().all()):
        return {"test_accuracy": 0.0}
    right = (outputs.argmax(1) == labels).double().mean()
    return {"test_loss": float(cross_entropy(outputs, labels)), "test_accuracy": float(right)}


def logits(net: nn.Module, params: Params, inputs: Tensor, batch_size: int = 128) -> Tensor:
    """Return (N, K) outputs of a network by the statistics of each batch."""
    model, tensors = copy.deepcopy(net).to(inputs.device).eval(), _copies(params)
    return _outputs(lambda part: functional_call(model, tensors, (part,)), inputs, batch_size)


def losses(net: nn.Module, params: Params, batch: Batch, batch_size: int = 128) -> Tensor:
    """Return (N,) cross-entropy of each example, by the statistics of each batch."""
    return cross_entropy(logits(net, params, batch.inputs, batch_size), batch.labels, reduction="none")


def predict_reestimated(
    net: nn.Module, params: Params, examples: Tensor, inputs: Tensor, batch_size: int = 128
) -> Tensor:
    """Return (N, K) outputs by statistics averaged over the batches of `examples` (HeteroFL's sBN)."""
    model = copy.deepcopy(net).to(inputs.device).eval()
    for module in model.modules():
        if isinstance(module, NORMS):
            module.track_running_stats, module.momentum = True, None  # None: the plain average over all batches
            module.running_mean = torch.zeros(module.num_features).to(examples)
            module.running_var = torch.ones(module.num_features).to(examples)
            module.num_batches_tracked = torch.tensor(0, device=examples.device)
            module.train()
    tensors = _copies(params) | dict(model.named_buffers())
    _outputs(lambda part: functional_call(model, tensors, (part,)), examples, batch_size)
    model.eval()
    return _outputs(lambda part: functional_call(model, tensors, (part,)), inputs, batch_size)


@torch.no_grad()
def _outputs(function: Callable[[Tensor], Tensor], inputs: Tensor, batch_size: int) -> Tensor:
    rows = torch.arange(len(inputs), device=inputs.device)
    with full_precision(inputs.device):
        return torch.cat([function(to_channels_last({"": inputs[part]})[""]) for part in batches(rows, batch_size)])


def _copies(params: Params) -> Params:
    """Return copies, as views of a flat vector may begin at addresses that GPU kernels cannot read."""
    return to_channels_last(tree.clone(params))
