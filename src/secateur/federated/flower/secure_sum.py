"""An auditor of Flower's secure aggregation (SecAgg+): it attacks what the server sees, which is the sum.

Flower has SecAgg+ in its older interface only (`ServerApp` with a workflow, strategies with `aggregate_fit`):

    strategy = AuditedSum(FedAvg(...), Auditor(...))
    workflow = DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.75))

Clients have `mods=[secaggplus_mod]`; with `upload_mod(DistributedPrivacy(...))` after it the sum has an epsilon. Each
client's number of examples and its metrics still arrive in the clear. Clients trust the server to run the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from flwr.common import FitRes, Parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy

from secateur.errors import WrongInput, check_whole
from secateur.federated.flower.strategies import Auditor
from secateur.interfaces import Batch, Params

SumTruth = Callable[[int], Batch | None]  # round -> the examples of all clients in its sum, where they are known


class AuditedSum(Strategy):
    """A strategy of Flower's older interface that attacks the average of every `every`-th round.

    Arrays have no names there, so they must come in the order of the network's state_dict.
    """

    def __init__(self, inner: Strategy, auditor: Auditor, *, every: int = 1, truth: SumTruth | None = None) -> None:
        check_whole("every", every)
        self.inner, self.auditor, self.every, self.truth = inner, auditor, every, truth
        self.sent: Params = {}
        self.average: Params = {}  # of the newest round
        self.least: int | None = None  # clients in the smallest sum so far

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Delegate to the inner strategy."""
        return self.inner.initialize_parameters(client_manager)

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Any:
        """Keep the model, then delegate to the inner strategy."""
        self.sent = self._name(parameters)
        return self.inner.configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Attack the sum, then delegate to the inner strategy."""
        if results:
            self._check(results)
            average = self._name(results[0][1].parameters)
            self.average, self.least = average, min(len(results), self.least or len(results))
            if server_round % self.every == 0:
                truth = None if self.truth is None else self.truth(server_round)
                self.auditor(server_round, None, self.sent, average, truth, clients=len(results))
        return self.inner.aggregate_fit(server_round, results, failures)

    def configure_evaluate(self, server_round: int, parameters: Parameters, client_manager: ClientManager) -> Any:
        """Delegate to the inner strategy."""
        return self.inner.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Parameters) -> Any:
        """Delegate to the inner strategy."""
        return self.inner.evaluate(server_round, parameters)

    def _name(self, parameters: Parameters) -> Params:
        state, arrays = self.auditor.knowledge.net.state_dict(), parameters_to_ndarrays(parameters)
        if [tuple(value.shape) for value in state.values()] != [array.shape for array in arrays]:
            raise WrongInput("knowledge", "its net has other tensors than the app's parameters; use the app's net")
        return {n: torch.as_tensor(a).to(value.dtype) for (n, value), a in zip(state.items(), arrays, strict=True)}

    @staticmethod
    def _check(results: list[tuple[ClientProxy, FitRes]]) -> None:
        """Refuse results of a run without secure aggregation, where every client's own update arrives."""
        first = results[0][1].parameters.tensors
        if any(result.parameters.tensors != first for _, result in results[1:]):
            raise WrongInput("workflow", "the updates arrive one by one; use SecAggPlusWorkflow as the fit_workflow")
