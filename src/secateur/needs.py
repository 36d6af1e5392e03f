"""What a job needs and may not have, said before any of it is done: packages of an extra, and shadow models."""

from __future__ import annotations

from collections.abc import Iterable

from secateur.catalogue import Choice, Defense
from secateur.config import Audit
from secateur.errors import WrongInput, require
from secateur.interfaces import CountsModels


def check_installed(defenses: Iterable[Defense], way: str = "auto") -> None:
    """Refuse a defense whose `requires` (a package, and the extra that brings it) is not installed, or a way's."""
    for part in (part for defense in defenses for part in defense.parts):
        if "requires" in part.method.info:
            require(*part.method.info["requires"])
    if way == "ray":
        require("ray", "ray")


def check_audit(config: Audit) -> None:
    """Refuse an audit that would miss a package, or have fewer shadow models than one of its attacks needs."""
    check_installed(config.defense, config.way)
    if not config.trains_shadows:
        return  # attacks that need them are left out, and their rows say so
    for attack in config.attack:
        check_models(attack, config.shadows, config.in_out)
        if config.protocol == "select":
            check_models(attack, config.shadows - 1, left="the adversary keeps one shadow to try its recipes on: ")


def check_models(attack: Choice, shadows: int, in_out: int = 0, left: str = "") -> None:
    """Refuse an attack that needs more models of the attacker's than there are."""
    if (missing := shortage(attack, shadows, in_out)) is not None:
        raise WrongInput("shadows", left + missing)


def shortage(attack: Choice, shadows: int, in_out: int = 0) -> str | None:
    """Why an attack cannot run with so many disjoint shadows and in-out models; None where it can."""
    if attack.method.info["shadows"] == "none":
        return None
    made = attack.make()
    if isinstance(made, CountsModels):
        return made.shortage(shadows, in_out)
    return None if shadows else f"{attack.name} needs at least 1 shadow model; 0 given"
