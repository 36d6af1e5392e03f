"""Run file of `secateur invert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from secateur.catalogue import Choice
from secateur.config.base import MANY, Common, OneInversion, OneUpdateDefense, Seeds, default
from secateur.config.methods import of_all
from secateur.errors import WrongInput


class Invert(Common):
    """`secateur invert`: reconstruction of training examples from one update."""

    model: str = "lenet-zhu"
    update: Path | None = None  # a captured update (.safetensors), which has no truth to compare with
    defense: Annotated[list[OneUpdateDefense], *MANY] = default("none")
    residual: Path | None = None  # error feedback's residual from a training (.safetensors); None: zero
    attack: Annotated[list[OneInversion], *MANY] = default("ig")
    targets: Annotated[int, Field(ge=1)] = 20  # attacked updates
    batch_size: Annotated[int, Field(ge=1)] = 1  # examples in each update
    labels: Literal["inferred", "oracle"] = "inferred"  # oracle: the attacker knows them
    adaptive: Literal["none", "support", "layer", "reapply", "mask"] = "none"
    restarts: Annotated[int, Field(ge=1)] | None = None  # None: the attack's default
    iterations: Annotated[int, Field(ge=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None  # then the client sends weights; None: a gradient
    local_batch: Annotated[int, Field(ge=1)] | None = None  # examples in a local step; None: all
    learning_rate: Annotated[float, Field(gt=0)] | None = None  # of the local steps; None: 0.1, or unknown for a file
    batchnorm: Literal["eval", "batch"] = "eval"  # the statistics by which the client normalises
    statistics: bool = False  # the attacker knows the batch's statistics: a much stronger attacker
    generator_steps: Annotated[int, Field(ge=1)] = 2000  # training steps of the generator of attacks such as ggl
    generator_width: Annotated[int, Field(ge=1)] = 64
    images: bool = True  # the page and the folder show training pictures
    together: Annotated[int, Field(ge=1)] | None = None  # targets attacked at once; None: all on a GPU, else 10
    seeds: Seeds = default(1)

    @property
    def attacks(self) -> list[Choice]:
        """The attacks with the run's restarts, iterations and adaptive mode, each where the attack has that parameter.

        Every attack must support the adaptive mode. Otherwise adaptive and plain results would stand side by side.
        """
        asked = {"restarts": self.restarts, "iterations": self.iterations, "adaptive": self.adaptive}
        over = {name: value for name, value in asked.items() if value not in (None, "none")}
        for attack in self.attack if "adaptive" in over else ():
            of_all([attack], adaptive=self.adaptive)
        return of_all(self.attack, **over)

    @property
    def meaningless(self) -> tuple[str, ...]:
        """The fields that have no meaning for a captured update, which is one target."""
        return () if self.update is None else ("targets", "together")

    @model_validator(mode="after")
    def _checked(self) -> Invert:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "nothing is trained here; give the weights of a trained model: --weights FILE")
        if self.local_batch is not None and self.local_batch > self.batch_size:
            raise WrongInput("local_batch", f"{self.local_batch} is not allowed; batch_size is {self.batch_size}")
        if self.local_steps is None and self.update is None:
            for name in ("learning_rate", "local_batch"):
                if getattr(self, name) is not None:
                    raise WrongInput(name, "is of a client's local steps; give local_steps too, or leave it out")
        if misplaced := [name for name in self.meaningless if name in self.model_fields_set]:
            what = "means nothing for an update that was captured: it is the one target"
            raise WrongInput(misplaced[0], f"{what}; leave out {misplaced[0]}, or update")
        if self.update is not None and self.weights is None:
            raise WrongInput("weights", "must be given with an update: the model that the server had sent")
        if self.update is not None and (self.labels == "oracle" or self.statistics):
            raise WrongInput("update", "comes without its truth; labels: oracle and statistics are not possible")
        if any(str(defense) != "none" for defense in self.defense):
            if self.update is not None:
                raise WrongInput("defense", "an update that was captured is made already; leave the defense out")
            if self.local_steps is not None:
                raise WrongInput("defense", "acts on a gradient, and local_steps send weights; leave one of them out")
        if self.residual is not None and not any(defense.acting_on("residual") for defense in self.defense):
            raise WrongInput("residual", "is what error feedback keeps; ask for it: --defense dgp+error-feedback")
        _ = self.attacks  # raises now if an attack lacks a parameter
        return self
