"""The attack step of a dgp study: inversion of defended updates by plain and by adaptive attackers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from secateur.catalogue import Choice, find
from secateur.config import defense_of_updates
from secateur.errors import WrongInput
from secateur.evaluation.client import check_attack
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import ClientExposure, chance_of
from secateur.experiments.invert_targets import needs_generator, with_untrained
from secateur.studies.dgp.scale import CIFAR10, DgpScale, DgpSetting

ADAPTIVE = ("support", "layer", "reapply", "mask")
NAMES = {"gi": "gi-dgp-paper"}  # catalogue names of attacks with the settings of the dgp paper


@dataclass(frozen=True)
class Attacked:
    """A step that runs one attack on the updates of one network, under every defense."""

    attack: str  # ig, gi, rob, r-gap or ggl
    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10
    batch_size: int = 1
    labels: Literal["inferred", "oracle"] = "inferred"
    adaptive: tuple[str, ...] = ADAPTIVE  # modes that may also be run: those that a defense is known to be weak against
    weights: Path | None = None  # a trained model
    residual: Path | None = None  # of a client in mid-training

    def __call__(self, setting: DgpSetting) -> None:
        """Run every attacker; add a row with the reason for an attack that cannot be mounted."""
        model = setting.model(self)
        if model is None:
            return
        for number, defense in enumerate(self.defenses):
            exposure = self.exposure(setting, model, defense)
            if number == 0:
                exposure.show_truths()
            exposure.show_guarantee()
            reasons: set[str] = set()  # adaptive attacks are mostly refused for the same reason as the plain one
            for attack in exposure.config.attacks:
                if (reason := _refused(exposure, attack)) is None:
                    exposure.measure(attack)
                elif reason not in reasons:
                    reasons.add(reason)
                    more = {"batch_size": self.batch_size, "attacked_by": self.attack}
                    labels = setting.labels(model, exposure.context.data, defense, "left out", **more)
                    setting.leave_out(labels, f"{attack} cannot be mounted: {reason}")

    def exposure(self, setting: DgpSetting, model: str, defense: str) -> ClientExposure:
        """Return the client under a defense, with all its attackers."""
        data = setting.data(self)
        config = setting.invert(
            model,
            data=data.name,
            defense=[defense],
            attack=list(attackers(self.attack, defense, setting.scale, self.adaptive)),
            batch_size=self.batch_size,
            labels=self.labels,
            weights=self.weights,
            residual=self.residual if "error-feedback" in defense else None,
        )
        context = SeedContext(setting.run, config, data, setting.device, setting.seed)
        trained = "" if self.weights is None else f"-{self.weights.stem}"  # a trained model's pictures: another folder
        folder = re.sub(r"[^\w.-]", "_", f"{model}-{data.name}-batch{self.batch_size}-{self.labels}{trained}")
        return ClientExposure(config, context, config.defense[0], f"pictures/{folder}")


def attackers(attack: str, defense: str, scale: DgpScale, adaptive: Sequence[str] = ADAPTIVE) -> Iterator[str]:
    """Yield the plain attack, then one adaptive attack per mode in `adaptive` that the defense is weak against."""
    name = NAMES.get(attack, attack)
    entry = find("inversion", name)
    defaults, adapts = entry.defaults, entry.info.get("adapts", ADAPTIVE)
    sizes = {"iterations": scale.rounds if attack == "ggl" else scale.iterations, "population": scale.population}
    text = ":".join([name, *(f"{key}={value}" for key, value in sizes.items() if key in defaults)])
    yield text
    if "adaptive" in defaults:
        weak = [mode for part in defense_of_updates(defense).parts for mode in part.method.info.get("adaptive", ())]
        yield from (f"{text}:adaptive={mode}" for mode in dict.fromkeys(weak) if mode in adapts and mode in adaptive)


def _refused(exposure: ClientExposure, attack: Choice) -> str | None:
    """Return the reason why an attack cannot be mounted; None if it can."""
    client = exposure.client
    attacked = with_untrained(client, exposure.config) if needs_generator(attack) else client
    try:
        check_attack(attack, attacked, exposure.targets[0], chance_of(exposure.seed, attack)[0])
    except WrongInput as error:
        return error.message
    return None
