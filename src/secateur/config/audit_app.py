"""Fields of `secateur audit-app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from secateur.catalogue import Choice
from secateur.config import base
from secateur.config.base import Fields, Limits, field, flag
from secateur.config.methods import set_parameters
from secateur.errors import WrongInput


class AuditApp(Fields):
    """`secateur audit-app`: an existing Flower app in simulation, with attacks on its clients' updates."""

    schema_version: Literal[1] = Field(1, alias="schema", description="Version of the run file's schema.")
    app: Path = field(..., "Folder of the app, which has a pyproject.toml.")
    run_config: str = flag("", "Settings of the app to change, as for flwr run: 'batch-size=8 local-epochs=1'.")
    clients: base.Count = flag(10, "Number of simulated clients.")
    defense: base.UpdateDefenses = flag(
        "none", "Defenses of updates to run the app with, such as none,dgp (secateur list defenses).", repeat=True
    )
    attack: Annotated[list[base.OneInversion], *base.MANY] = flag(
        "ig", "Inversion attacks (secateur list attacks).", repeat=True
    )
    attack_at: Annotated[list[base.Count], *base.MANY] = flag("1", "Rounds to attack, such as 1,3.", repeat=True)
    attack_clients: base.Count = flag(4, "Number of clients to attack: those of the first partitions.")
    labels: Literal["inferred", "oracle"] = flag("inferred", base.LABELS)
    restarts: base.Count | None = flag(None, "Trials of every attack; the one with the lowest loss counts.")
    iterations: base.Count | None = flag(None, base.ITERATIONS)
    mean: Annotated[list[float], *base.ANY] = flag(
        "none", "Mean of each channel, for pixels in [0, 1]. By default by the range of the app's inputs."
    )
    std: Annotated[list[base.Positive], *base.ANY] = flag("none", "Deviation of each channel, with mean.")
    images: bool = flag(True, base.IMAGES)
    seeds: base.Seeds = flag(1, base.NUMBER_OF_SEEDS)
    device: base.Device = flag("auto", f"Device of the attacks: {base.DEVICES}.")
    threads: base.Threads = field(1, "CPU threads of the attacks.")
    limits: Limits = field(Limits, "Upper limits on leakage; exit code 1 above one of them, 3 if it is inconclusive.")

    @property
    def attacks(self) -> list[Choice]:
        """The attacks with the run's restarts and iterations, each where the attack has that parameter."""
        fields = {"restarts": self.restarts, "iterations": self.iterations}
        return set_parameters(self.attack, **{name: value for name, value in fields.items() if value is not None})

    @property
    def joined(self) -> int:
        """The largest number of a client's rounds that an attack joins."""
        return max(int(dict(attack.arguments).get("rounds", 1)) for attack in self.attacks)

    @property
    def watched(self) -> list[int]:
        """The rounds whose updates attacks use: the attacked ones, and earlier ones that are joined."""
        return sorted({number - back for number in self.attack_at for back in range(self.joined)})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.mean) != bool(self.std):
            missing = "std" if self.mean else "mean"
            raise WrongInput(missing, "is missing; mean and std are only used together")
        if self.attack_clients > self.clients:
            raise WrongInput("attack_clients", f"{self.attack_clients} is too many; there are {self.clients} clients")
        if self.joined > min(self.attack_at):  # raises now if an attack lacks a parameter
            few = f"round {min(self.attack_at)} has too few before it, and an attack joins {self.joined} rounds"
            raise WrongInput("attack_at", f"{few}; use {self.joined} or later, and as many rounds of the app")
        return self
