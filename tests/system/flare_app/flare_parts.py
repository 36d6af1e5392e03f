"""An executor that trains a step, and a controller that writes down what arrives: parts of a FLARE job for tests."""

import json
from pathlib import Path

import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.impl.controller import Controller, Task
from nvflare.app_common.app_constant import AppConstants

RATE = 0.1


def network(input_shape=(1, 8, 8), classes=10):
    """The network of the example of Flower."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [torch.nn.Conv2d(1, 12, 5, padding=2, stride=2), torch.nn.Sigmoid(), torch.nn.Flatten()]
        return torch.nn.Sequential(*parts, torch.nn.Linear(192, 10))


def arrays(net):
    return {name: value.detach().numpy().copy() for name, value in net.state_dict().items()}


class Step(Executor):
    """Trains one step on one picture; sends weights, their difference, or something else."""

    def __init__(self, kind="WEIGHT_DIFF"):
        super().__init__()
        self.kind = kind

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        received, net = from_shareable(shareable).data, network()
        net.load_state_dict({name: torch.as_tensor(value) for name, value in received.items()})
        picture = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(7))
        torch.nn.functional.cross_entropy(net(picture), torch.tensor([3])).backward()
        torch.optim.SGD(net.parameters(), RATE).step()
        trained = arrays(net)
        data = {
            "WEIGHTS": trained,
            "WEIGHT_DIFF": {name: value - received[name] for name, value in trained.items()},
            "METRICS": {"leak": trained["3.bias"].tolist()},
        }[self.kind]
        reply = DXO(DataKind(self.kind), data).to_shareable()
        reply.set_return_code(ReturnCode.OK)
        return reply


class WriteDown(Controller):
    """Asks every client once a round, and writes what each of them sent."""

    def __init__(self, out, rounds=2, clients=3):
        super().__init__()
        self.out, self.rounds, self.clients = out, rounds, clients
        self._seen = []

    def start_controller(self, fl_ctx):
        pass

    def stop_controller(self, fl_ctx):
        pass

    def control_flow(self, abort_signal, fl_ctx):
        for number in range(self.rounds):
            content = DXO(DataKind.WEIGHTS, arrays(network())).to_shareable()
            content.set_header(AppConstants.CURRENT_ROUND, number)
            task = Task("train", content, timeout=100, result_received_cb=self._take)
            self.broadcast_and_wait(task, fl_ctx, min_responses=self.clients, abort_signal=abort_signal)
        Path(self.out).write_text(json.dumps(self._seen))

    def _take(self, client_task, fl_ctx):
        result, one = client_task.result, {"client": client_task.client.name}
        one["code"] = str(result.get_return_code())
        one["dxo"] = "DXO" in result
        if one["dxo"]:
            values = from_shareable(result).data
            one["values"] = {name: torch.as_tensor(value).flatten().tolist() for name, value in values.items()}
        self._seen.append(one)

    def process_result_of_unknown_task(self, client, task_name, client_task_id, result, fl_ctx):
        pass
