"""Run file of `secateur invert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import model_validator

from secateur.catalogue import Choice
from secateur.config import base
from secateur.config.base import Common, Limits, field, flag
from secateur.config.methods import set_parameters
from secateur.errors import WrongInput


class Invert(Common):
    """`secateur invert`: reconstruction of training examples from one update."""

    model: str = flag("lenet-zhu", base.MODEL)
    update: Annotated[list[Path], *base.ANY] = flag(
        "none",
        "Captured update (.safetensors) to attack, without a truth. Others of the client serve rounds=N of an attack, "
        "or --optimiser unknown.",
        repeat=True,
    )
    sent: Annotated[list[Path], *base.ANY] = flag(
        "none", "Models before the other updates, in their order. By default the model of weights.", repeat=True
    )
    input_shape: Annotated[list[base.Count], *base.ANY] = flag(
        "none", "Picture of a captured update: channels,height,width; needs no data then."
    )
    defense: base.UpdateDefenses = flag("none", "Defenses (secateur list defenses).", repeat=True)
    residual: Path | None = flag(None, "Residual of error feedback from a training (.safetensors). By default zero.")
    attack: Annotated[list[base.OneInversion], *base.MANY] = flag(
        "ig", "Inversion attacks (secateur list attacks).", repeat=True
    )
    targets: base.Count = flag(20, "Number of updates to attack.")
    batch_size: base.Count = flag(1, "Examples in an update.")
    labels: Literal["inferred", "oracle"] = flag("inferred", base.LABELS)
    adaptive: Literal["none", "support", "layer", "reapply", "mask", "loss", "fill"] = flag(
        "none", "Attacker's use of the defense: none, support, layer, reapply, mask, loss or fill."
    )
    restarts: base.Count | None = flag(None, "Trials of every attack; the one with the lowest loss counts.")
    iterations: base.Count | None = flag(None, base.ITERATIONS)
    rounds_before: base.FromZero = flag(0, "Rounds of training before the attacked update; 0: it is the first one.")
    users: base.Count = field(10, "Users that train together in these rounds, the attacked client among them.")
    batch_before: base.Count = field(32, "Examples of a user's update in these rounds.")
    repeats: base.Count = flag(1, "Rounds in a row that are of the same examples, which attacks with rounds=N join.")
    local_steps: base.Count | None = flag(None, "Local steps, after which the client sends weights, not a gradient.")
    local_epochs: base.Count | None = flag(None, "Local epochs of batches of local_batch, instead of local steps.")
    local_batch: base.Count | None = flag(None, "Examples in a local step. By default all.")
    optimiser: base.OneOptimiser = flag(
        "sgd", "Optimiser of the local steps: sgd:momentum=.9:weight_decay=1e-4, adam, adamw; or unknown."
    )
    learning_rate: base.Positive | None = flag(None, "Learning rate of the local steps. By default .1; .001 for adam.")
    batchnorm: Literal["eval", "batch"] = flag("eval", "Statistics by which the client normalises: eval or batch.")
    statistics: bool = field(False, "The attacker knows the batch's statistics, and is much stronger.")
    generator_steps: base.Count = field(2000, "Training steps of the generator of attacks such as ggl.")
    generator_width: base.Count = field(64, "Width of this generator.")
    images: bool = flag(True, base.IMAGES)
    together: base.Count | None = field(None, "Targets attacked at once; null: all on a GPU, else 10.")
    seeds: base.Seeds = flag(1, base.NUMBER_OF_SEEDS)
    limits: Limits = field(Limits, "Upper limits on leakage; exit code 1 above one of them, 3 if it is inconclusive.")

    @property
    def attacks(self) -> list[Choice]:
        """The attacks with the run's restarts, iterations and adaptive mode, each where the attack has that parameter.

        Every attack must support the adaptive mode. Otherwise adaptive and plain results would stand side by side.
        """
        fields = {"restarts": self.restarts, "iterations": self.iterations, "adaptive": self.adaptive}
        parameters = {name: value for name, value in fields.items() if value not in (None, "none")}
        for attack in self.attack if "adaptive" in parameters else ():
            set_parameters([attack], adaptive=self.adaptive)
        return set_parameters(self.attack, **parameters)

    @property
    def captured(self) -> Path | None:
        """The captured update that is attacked; None if updates are computed here."""
        return self.update[0] if self.update else None

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """The fields that a captured update does not use, because it is the only target."""
        return () if not self.update else ("targets", "together", *(("data",) if self.lacks_data else ()))

    @property
    def trains(self) -> bool:
        """True if the client takes local steps and sends its weights."""
        settings = (self.local_steps, self.local_epochs)
        return any(value is not None for value in settings) or self.optimiser != base.PLAIN

    @property
    def rate(self) -> float | None:
        """The learning rate of the local steps; None if it is not known, as with some captured updates."""
        if self.learning_rate is not None or self.update:
            return self.learning_rate
        return 0.001 if self.optimiser.startswith("adam") else 0.1

    @property
    def lacks_data(self) -> bool:
        """True if a captured update is attacked with its picture's shape alone."""
        return bool(self.update) and bool(self.input_shape) and "data" not in self.model_fields_set

    @model_validator(mode="after")
    def _check(self) -> Invert:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "nothing is trained here; use the weights of a trained model: --weights FILE")
        if self.local_batch is not None and self.local_batch > self.batch_size:
            raise WrongInput("local_batch", f"{self.local_batch} is not allowed; batch_size is {self.batch_size}")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_epochs", "cannot be combined with local_steps; leave one of them out")
        if self.optimiser == base.UNKNOWN and not self.update:
            raise WrongInput("optimiser", "unknown is about a captured update; set update, or write the client's own")
        if not self.trains and not self.update:
            used = ("learning_rate",) if self.rounds_before or self.repeats > 1 else ()
            for name in ("learning_rate", "local_batch"):
                if getattr(self, name) is not None and name not in used:
                    raise WrongInput(name, "is about local steps; set local_steps too, or leave it out")
        self._check_rounds()
        if not self.update and self.input_shape:
            raise WrongInput("input_shape", "describes a captured update; set update too, or leave it out")
        for name in self.unused_fields:
            if name in self.model_fields_set:
                raise WrongInput(name, "cannot be combined with update, which is the only target; leave it out")
        self._check_further()
        if self.update:
            self._check_captured()
        if any(str(defense) != "none" for defense in self.defense) and self.trains:
            raise WrongInput("defense", "cannot be combined with local steps: it acts on gradients, not on weights")
        if self.residual is not None and not any(defense.find_part("residual") for defense in self.defense):
            raise WrongInput("residual", "needs error feedback; use --defense dgp+error-feedback")
        _ = self.attacks  # raises now if an attack lacks a parameter
        return self

    def _check_rounds(self) -> None:
        """Refuse fields that several rounds of a client contradict."""
        several = {"rounds_before": self.rounds_before > 0, "repeats": self.repeats > 1}
        for name in (name for name, is_set in several.items() if is_set):
            if self.update:
                raise WrongInput(name, "cannot be combined with update, which is captured already; leave it out")
        for name in ("users", "batch_before"):
            if not self.rounds_before and getattr(self, name) != type(self).model_fields[name].default:
                raise WrongInput(name, "is about the rounds before the attacked one; set rounds_before too")
        if self.rounds_before and (self.residual is not None or self.trains):
            field = "residual" if self.residual is not None else "local steps"
            raise WrongInput("rounds_before", f"cannot be combined with {field}: its rounds send gradients")
        if self.repeats > 1 and self.statistics:
            raise WrongInput("repeats", "cannot be combined with statistics, which are of one round; leave it out")

    def _check_further(self) -> None:
        """Refuse further captured updates that nothing uses, and models that fit no update."""
        further = max(0, len(self.update) - 1)
        joined = max(dict(attack.arguments).get("rounds", 1) for attack in self.attacks)
        if further and joined == 1 and self.optimiser != base.UNKNOWN:
            many = f"has {len(self.update)} files, and only attacks with rounds=N and --optimiser unknown use several"
            raise WrongInput("update", f"{many}; use one, or for example --attack ig:rounds={further + 1}")
        if self.update and joined > further + 1:
            raise WrongInput(
                "update", f"has {further + 1} files, and an attack joins {joined} rounds; use one for each"
            )
        if len(self.sent) not in (0, further):
            raise WrongInput("sent", f"has {len(self.sent)} files for {further} further updates; use one for each")

    def _check_captured(self) -> None:
        """Refuse fields that a captured update contradicts."""
        if self.input_shape and len(self.input_shape) != 3:
            raise WrongInput("input_shape", f"has {len(self.input_shape)} numbers; write channels,height,width")
        if self.lacks_data and self.classes is None:
            raise WrongInput("classes", "is missing; without data write the number of the model's classes")
        for name in ("mean", "std"):
            if self.input_shape and len(getattr(self, name)) not in (0, self.input_shape[0]):
                raise WrongInput(name, f"must be one number for each of the {self.input_shape[0]} channels")
        if self.weights is None:
            raise WrongInput("weights", "must be set with update: the model that the server sent")
        if self.labels == "oracle" or self.statistics:
            raise WrongInput("update", "cannot be combined with labels: oracle or statistics: its truth is not known")
        if any(str(defense) != "none" for defense in self.defense):
            raise WrongInput("defense", "cannot be combined with update, which is captured already; leave it out")
