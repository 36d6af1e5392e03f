"""A probe in the clients of somebody else's Flower app: it watches their training, and changes nothing.

Torch itself tells what happens. Hooks of all modules show the network and its inputs, and hooks of all optimisers show
every step. A function mode shows the labels at the loss. So the app needs no line of ours. The network, the optimiser
and the sizes of the steps are knowledge of the server, which hands out the app. The examples are the evaluator's alone.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from flwr.app import Context, Error, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from secateur.errors import WrongInput
from secateur.federated.flower.link import tensors_of
from secateur.federated.flower.mod import decode_reply, round_of, upload_mod
from secateur.federated.flower.project import AppProject
from secateur.interfaces import Batch, Loss, Optimiser, Params, Upload
from secateur.seeding import derive, draw_seed

ORDER = "secateur.order"  # the record of a message that orders a probe; the app never sees it
LOSSES = (F.cross_entropy, F.nll_loss)  # of classes, which an attack can imitate
OTHERS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits)
SAME = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")  # settings without a say


@dataclass
class ClientTraining:
    """The training of one client in one round, as the probe saw it."""

    client: int  # its partition
    nets: list[nn.Module] = field(default_factory=list)  # that were trained
    losses: list[tuple[Callable[..., Tensor], dict[str, Any]]] = field(default_factory=list)  # without repetitions
    optimisers: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # class and settings, likewise
    rates: list[float] = field(default_factory=list)  # of every step
    steps: list[Batch] = field(default_factory=list)  # the examples of every step; evaluator only
    classes: int = 0
    trained: Params = field(default_factory=dict)  # the parameters after the last step

    @property
    def loss(self) -> Loss:
        """The client's loss; refuse one that an attack cannot imitate."""
        if len(self.losses) != 1 or self.losses[0][0] not in LOSSES:
            names = ", ".join(sorted({function.__name__ for function, _ in self.losses})) or "none"
            raise WrongInput("app", f"its loss is {names}; attacks take one cross_entropy or nll_loss of classes")
        function, settings = self.losses[0]
        return partial(function, **settings)

    @property
    def net(self) -> nn.Module:
        """The network; refuse a client that trains none or several."""
        if len(self.nets) != 1:
            raise WrongInput("app", f"its clients train {len(self.nets)} networks; attacks take one")
        return self.nets[0]

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser of the steps; refuse one that attacks cannot unroll."""
        if len(self.optimisers) != 1:
            raise WrongInput("app", f"its clients use {len(self.optimisers)} settings of optimisers; attacks take one")
        name, settings = self.optimisers[0]
        return read_optimiser(name, settings, self.rates)


def read_optimiser(name: str, settings: dict[str, Any], rates: list[float]) -> Optimiser:
    """Return an optimiser of torch as ours; refuse a kind or a setting that ours does not have.

    Example:
        >>> str(read_optimiser("SGD", {"momentum": 0.9, "dampening": 0, "maximize": False}, [0.1, 0.1]))
        'sgd:momentum=0.9'
    """
    kinds = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
    if name not in kinds:
        raise WrongInput("app", f"its optimiser is {name}; attacks unroll {', '.join(kinds)}")
    ours = ("momentum", "nesterov", "weight_decay", "betas", "eps")
    if strange := [key for key, value in settings.items() if key not in (*ours, *SAME) and value]:
        raise WrongInput("app", f"its {name} has {strange[0]}={settings[strange[0]]}; attacks unroll it without")
    known = {key: value for key, value in settings.items() if key in ours}
    known |= {"betas": tuple(known["betas"])} if "betas" in known else {}
    schedule = "constant" if len(set(rates)) == 1 else tuple(rates)
    return Optimiser(kinds[name], schedule=schedule, **known)  # type: ignore[arg-type]


class Probe(TorchFunctionMode):
    """A watch over the training in its context; the steps that it saw are in `training`."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.training = ClientTraining(client)
        self.active: nn.Module | None = None  # the outermost network of a forward pass
        self.inputs: list[Tensor] = []  # since the last step
        self.labels: list[Tensor] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        handles = [
            register_module_forward_pre_hook(self._begin_forward),
            register_module_forward_hook(self._end_forward, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        for handle in handles:
            self._hooks.callback(handle.remove)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (*LOSSES, *OTHERS) and isinstance(result, Tensor) and result.requires_grad:
            settings = dict(inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
            self._note_loss(func, settings)
        return result

    def _note_loss(self, function: Callable[..., Tensor], settings: dict[str, Any]) -> None:
        logits, labels = settings.pop("input"), settings.pop("target")
        settings = {name: value for name, value in settings.items() if value is not None}
        self.training.classes = logits.shape[1] if logits.ndim > 1 else 1
        if not any(function is known and _are_same(settings, other) for known, other in self.training.losses):
            self.training.losses.append((function, settings))
        self.labels.append(labels.detach().cpu().clone())

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        trains = module.training and torch.is_grad_enabled()
        if self.active is not None or not trains or not any(p.requires_grad for p in module.parameters()):
            return
        self.active = module
        if not any(module is known for known in self.training.nets):
            self.training.nets.append(module)
        tensors = [value for value in args if isinstance(value, Tensor)]
        self.inputs += [value.detach().cpu().clone() for value in tensors[:1]]

    def _end_forward(self, module: nn.Module, args: Any, result: Any) -> None:
        if module is self.active:
            self.active = None

    def _begin_step(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimiser.param_groups:
            names = ("params", "lr", "initial_lr")
            settings = {name: value for name, value in group.items() if name not in names}
            chosen = (type(optimiser).__name__, settings)
            if chosen not in self.training.optimisers:
                self.training.optimisers.append(chosen)
        rates = {float(group["lr"]) for group in optimiser.param_groups}
        if len(rates) > 1:
            self.training.optimisers.append((type(optimiser).__name__, {"rates": sorted(rates)}))
        self.training.rates.append(max(rates))
        if self.inputs and len(self.inputs) == len(self.labels):
            self.training.steps.append(Batch(torch.cat(self.inputs), torch.cat(self.labels)))
        self.inputs, self.labels = [], []

    def _end_step(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.training.nets:
            params = self.training.nets[0].named_parameters()
            self.training.trained = {name: value.detach().cpu().clone() for name, value in params}


def _are_same(settings: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two losses have equal settings, of which some may be tensors."""
    return settings.keys() == other.keys() and all(
        bool(torch.equal(value, other[name])) if isinstance(value, Tensor) else value == other[name]
        for name, value in settings.items()
    )


class ProbedApp(ClientApp):
    """A client app that runs another one, with its settings, a defense of updates, and a probe where one is ordered."""

    def __init__(self, project: AppProject, upload: Upload | None, seed: int) -> None:
        super().__init__()
        self.project, self.upload, self.seed = project, upload, seed

    def __call__(self, message: Message, context: Context) -> Message:
        """Run the app on one message."""
        app = self.project.load_client()
        order: Any = message.content.pop(ORDER, {})
        clients, file = order.get("clients", []), Path(str(order.get("file")))
        node, state = context.node_config, context.state
        home = Context(context.run_id, context.node_id, node, state, dict(self.project.config))  # Flower's is fixed
        client = int(node["partition-id"])
        set_seed(draw_seed(derive(self.seed, message.metadata.message_type, round_of(message), client), 2**32))
        trains = message.metadata.message_type.split(".")[0] == MessageType.TRAIN

        def call(message: Message, context: Context) -> Message:
            if client not in clients:
                return self._run(app, message, context)
            with Probe(client) as probe:
                reply = self._run(app, message, context)
            from ray import cloudpickle  # takes networks that pickle refuses, such as those of a notebook

            torch.save(probe.training, file, pickle_module=cloudpickle)
            return reply

        try:
            if self.upload is None or not trains:
                reply = call(message, home)
            else:
                reply = upload_mod(self.upload, wire=True, seed=self.seed)(message, home, call)
        except Exception as error:  # whatever the app raises; Flower would send a traceback of its own actors
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code, f"{type(error).__name__}: {error}"), reply_to=message)
        context.state = home.state
        return reply

    def _run(self, app: ClientApp, message: Message, context: Context) -> Message:
        """Run the app; weights of its own wire format become arrays, which a further defense takes."""
        asked, models = message.content, list(message.content.array_records.values())
        sent = tensors_of(models[0]) if self.upload is not None and len(models) == 1 else None  # an app may change it
        reply = app(message, context)
        if sent is not None and not reply.has_error():
            decode_reply(reply, sent, asked)
        return reply


def set_seed(seed: int) -> None:
    """Set the seeds of the global generators, which a foreign app draws from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
