"""A small attack on updates for tests: exact on a linear network, saves its state, and can be stopped on the way."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from secateur import catalogue
from secateur.attacks.inversion.updates import read_gradient
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Reconstruction


def linear(input_shape=(1, 8, 8), classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], classes))


@dataclass(frozen=True)
class Tiny:
    """Reads the input off a linear layer's gradient, row over bias, a step at a time: nobody's method."""

    iterations: int = 20
    misses: int = 0  # so many of a batch are not given back
    stop: int = -1  # raises KeyboardInterrupt after so many steps
    adaptive: str = "none"

    def check(self, knowledge, view):
        if knowledge.local_steps > 1:
            raise WrongInput("attack tiny", "needs one local step")

    def tamper(self, net, state, knowledge, rng):
        return net, state

    def reconstruct(self, targets, knowledge, chance, watch):
        noise = torch.stack([torch.randn(*knowledge.input_shape, generator=rng) for rng in chance])
        aims = torch.stack([self.read(views[0], knowledge) for views in targets])
        state = {"step": torch.zeros(1, dtype=torch.int64), "x": noise}
        state = watch.load() or state
        for step in range(int(state["step"]), self.iterations):
            if step == self.stop:
                raise KeyboardInterrupt
            state = {"step": torch.tensor([step + 1]), "x": (state["x"] + aims) / 2}
            watch.advance(1)
            watch.save(
                state, [self.made(x, view, knowledge, step) for x, view in zip(state["x"], targets, strict=True)]
            )
        for i, x in enumerate(state["x"]):
            yield i, self.made(x, targets[i], knowledge, self.iterations)

    def read(self, view, knowledge):
        gradient = read_gradient(view, knowledge)
        weight, bias = gradient["1.weight"], gradient["1.bias"]
        return (weight[bias.argmin()] / bias.min()).view(knowledge.input_shape)

    def made(self, x, views, knowledge, step):
        label = read_gradient(views[0], knowledge)["1.bias"].argmin().view(1)
        count = max(0, knowledge.batch_size - self.misses)
        batch = Batch(x.expand(count, *x.shape), label.expand(count))
        return Reconstruction(
            batch, 1 / (1 + step), [(i, 1 / (1 + i)) for i in range(step)], 2, diverged=1, note="read"
        )


class Meddling(Tiny):
    """Sends a model of its own."""

    def tamper(self, net, state, knowledge, rng):
        return net, {name: torch.zeros_like(value) for name, value in state.items()}


class Broken(Tiny):
    """All its trials diverge."""

    def made(self, x, views, knowledge, step):
        return replace(super().made(x, views, knowledge, step), loss=float("inf"), note="every trial diverged")


def install(monkeypatch):
    catalogue.methods("inversion")
    known = catalogue._known["inversion"]
    for name, make, active in (("tiny", Tiny, False), ("meddling", Meddling, True), ("broken", Broken, False)):
        info = {"threat": "a server that sees one linear layer's update", "active": active}
        monkeypatch.setitem(known, name, catalogue.Method("inversion", name, "-", make, info))
