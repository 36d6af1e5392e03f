"""int8 quantisation of a trained network, by torchao: weights of one byte, with a scale for each output channel."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from secateur.catalogue import method
from secateur.errors import WrongInput, require
from secateur.interfaces import Batch
from secateur.models.create import example_rows


@method("pruner", "int8", "-", requires=("torchao", "compress"))
@dataclass(frozen=True)
class Int8:
    """Rounds weights and activations to int8 after training (post-training quantisation by torchao; no fine-tuning).

    `mode`: "static" covers every convolution and linear layer, folds BatchNorm, and takes the ranges of activations
    from training rows. "dynamic" covers the linear layers alone, and scales every row of activations by itself.
    It takes no sparsity. After a pruner, as in l1-structured+int8, channels that can be removed are removed first.

    Equation: `w' = s clamp(round(w / s), -128, 127)`.
    """

    uses_sparsity: ClassVar[bool] = False
    mode: Literal["static", "dynamic"] = "static"

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Refuse a network that cannot be quantised."""
        require("torchao", "compress")
        if self.mode == "dynamic" and not any(isinstance(module, nn.Linear) for module in net.modules()):
            raise WrongInput("pruner", "int8:mode=dynamic quantises linear layers, and this model has none; use static")
        if self.mode == "static":
            _export(net, example_rows(net, input_shape))

    def convert(self, net: nn.Module, batch: Batch) -> nn.Module:
        """Return the quantised network, which answers in eval mode; `batch` sets the ranges of activations."""
        require("torchao", "compress")
        net = copy.deepcopy(net).cpu().eval()
        with _quiet():
            return _round_rows(net) if self.mode == "dynamic" else _round_statically(net, batch.inputs.cpu())


class QuantisedNet(nn.Module):
    """Network that can only be asked: an exported graph has no training mode."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.network = graph  # the name "graph" belongs to graph modules
        self.training = False

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the answers."""
        return self.network(inputs)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: object) -> QuantisedNet:
        return self  # nothing can change it

    def train(self, mode: bool = True) -> QuantisedNet:
        """Return the network unchanged."""
        return self


def _round_rows(net: nn.Module) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(net, Int8DynamicActivationInt8WeightConfig())
    return net.requires_grad_(False)


def _round_statically(net: nn.Module, inputs: Tensor) -> nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config()
    observed = prepare_pt2e(_export(net, inputs[:2]), x86.X86InductorQuantizer().set_global(config))
    with torch.no_grad():
        observed(inputs)
    graph = convert_pt2e(observed)
    _drop_unused(graph)
    return QuantisedNet(graph).requires_grad_(False)


def _export(net: nn.Module, rows: Tensor) -> fx.GraphModule:
    """Return the graph of a network for any number of rows."""
    try:
        with _quiet():
            free = ({0: torch.export.Dim.AUTO},)
            return torch.export.export(copy.deepcopy(net).cpu().eval(), (rows,), dynamic_shapes=free).module()
    except Exception as error:  # a user's forward may raise anything
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WrongInput(
            "model", f"cannot be exported, which int8 needs ({reason}); use int8:mode=dynamic, or prune it"
        ) from error


def _drop_unused(graph: fx.GraphModule) -> None:
    """Delete the float weights that the quantised graph no longer reads."""
    read = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, part = name.rpartition(".")
            delattr(graph.get_submodule(owner), part)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back messages of torchao and torch.export: kernels of other machines, and names that will move."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
