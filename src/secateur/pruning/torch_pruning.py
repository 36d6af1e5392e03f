"""Torch-Pruning as a backend: channels of any network whose layers it can follow, grouped and attention included."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, require
from secateur.interfaces import Batch
from secateur.models.create import example_rows
from secateur.pruning.channels import CONVS


@method("pruner", "torch-pruning", "-", requires=("torch_pruning", "compress"))
@dataclass(frozen=True)
class TorchPruning:
    """Removes the channels of least norm by Torch-Pruning, for networks that l1-structured refuses (DepGraph 2023).

    Grouped convolutions and attention are taken. The smaller network is then fine-tuned. The layer of the
    outputs stays whole. `order` is that of the norm; `scope` chooses in every layer by itself, or over the network.

    Equation: `score(channel) = norm of its weights, of that order; the lowest go`.
    """

    uses_sparsity: ClassVar[bool] = True
    order: Literal[1, 2] = 2
    scope: Literal["layer", "global"] = "layer"

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Refuse a network that Torch-Pruning cannot follow."""
        self._remove(copy.deepcopy(net), input_shape, 0.5)

    def reshape(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> nn.Module:
        """Return a smaller copy of the network, with the weights of the channels that stay."""
        check_number("sparsity", sparsity, "[0, 1)")
        return self._remove(copy.deepcopy(net), tuple(batch.inputs.shape[1:]), sparsity)

    def _remove(self, net: nn.Module, input_shape: tuple[int, ...], sparsity: float) -> nn.Module:
        require("torch_pruning", "compress")
        import torch_pruning as backend

        rows = example_rows(net, input_shape)
        training = net.training
        try:
            shape, outputs = _find_outputs(net.eval(), rows)
            pruner = backend.pruner.BasePruner(
                net,
                rows,
                importance=backend.importance.GroupMagnitudeImportance(p=self.order),
                global_pruning=self.scope == "global",
                pruning_ratio=sparsity,
                ignored_layers=[outputs],
            )
            pruner.step()
            if net(rows).shape != shape:
                raise ValueError(f"its outputs would be {tuple(net(rows).shape)}")
        except Exception as error:  # the backend raises whatever a user's forward does
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise WrongInput("model", f"Torch-Pruning cannot prune it ({reason}); use l1-unstructured") from error
        return net.train(training)


def _find_outputs(net: nn.Module, rows: Tensor) -> tuple[torch.Size, nn.Module]:
    """Return the shape of the network's answers, and the layer that was called last, which gives them."""
    called: list[nn.Module] = []
    layers = [module for module in net.modules() if isinstance(module, (*CONVS, nn.Linear))]
    hooks = [layer.register_forward_hook(lambda module, *_: called.append(module)) for layer in layers]
    with torch.no_grad():
        shape = net(rows).shape
    for hook in hooks:
        hook.remove()
    return shape, called[-1]
