"""Strength of the attacks that a defense met: the evidence without which nothing recognised shows no safety."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from secateur.attacks.inversion.adaptive import FILL, FOLLOWS, MAGNITUDES, PLAIN, mode_of, settings_of_mode
from secateur.catalogue import Method, methods, name_of, split
from secateur.defenses import AGAINST_NOTHING, AGAINST_TRAINING, IMITATING, IN_OUT
from secateur.evaluation.calibration import WEIGHTS
from secateur.evaluation.reconstruction import COLOUR, fewest_updates
from secateur.runs.rows import Row

UNMET = "did not meet "  # the first words about attackers that are missing, also in notes of rows
SMOOTH = "ig-smooth"  # the search at noisy pictures, beside ig and sgi
SHADOW_FEDERATIONS = 8  # of the strongest attacker on the clients of sub-models
AGAINST_SUBMODELS = (
    f"lira or rmia:gamma=1 on {SHADOW_FEDERATIONS} shadow federations (--set shadow_federations={SHADOW_FEDERATIONS})"
)
EMPTY = "empty"  # the label of a residual before the first round
FLAGS = re.compile(r" \(--[^)]*\)")
OPTIMISER = re.compile(r"\bsteps? of (\w+)")  # in the words of an update (client.describe_weights)


@dataclass(frozen=True)
class Strength:
    """Strength of one attack: its iterations, its weight of total variation, and the updates that it saw."""

    name: str
    updates: int
    weights: frozenset[float | None]  # of total variation
    tuned: bool  # no weight of total variation, or one that its attacker chose for such pictures
    empty: bool = False  # error feedback had an empty residual, as in a client's first round alone
    optimiser: str = ""  # of the client's steps; empty: plain SGD, or a gradient was sent
    colour: bool = False  # the pictures have colours, so they are likely photographs

    @property
    def mode(self) -> str:
        """The way in which the attacker adapts to the defense."""
        return read_mode(self.name)

    def setting(self, name: str, default: str) -> str:
        """Return a setting of the attack as text."""
        return read_settings(self.name).get(name, default)

    @property
    def smooth(self) -> bool | None:
        """True for a search at noisy pictures, which prefers natural ones; None if the attack is no search."""
        entry = _find(self.name)
        if entry is None or "smoothing" not in entry.defaults:
            return None
        return float(self.setting("smoothing", str(entry.defaults["smoothing"]))) > 0

    @property
    def cut(self) -> str | None:
        """The iterations, if they are fewer than those of the attack's paper."""
        entry = _find(self.name)
        whole = 0 if entry is None else entry.defaults.get("iterations", 0)
        taken = int(self.setting("iterations", str(whole)))
        return f"{name_of(self.name)} took {taken} of its {whole} iterations" if taken < whole else None


def read_settings(attack: str) -> dict[str, str]:
    """Return the settings of an attack that is written with them."""
    return dict(part.split("=", 1) for part in split(attack)[1:])


def read_mode(attack: str) -> str:
    """Return the mode of an attack that is written with its settings.

    Example:
        >>> read_mode("ig:iterations=9"), read_mode("sgi:adaptive=support:follows=true:rounds=3")
        ('none', 'support+follows+accumulates')
    """
    settings = read_settings(attack)
    follows, magnitudes = (settings.get(name, "false").lower() == "true" for name in (FOLLOWS, MAGNITUDES))
    return mode_of(settings.get("adaptive", PLAIN), follows, int(settings.get("rounds", 1)), magnitudes)


def measure_strength(name: str, rows: Sequence[Row]) -> Strength:
    """Return the strength of an attack from its rows on one defense."""
    counts = [row for row in rows if row.metric == "updates"]
    alone = [row for row in counts if not pools(row)] or counts
    tuned = all(row.extra.get("calibrated") or not row.extra.get("total_variation") for row in rows)
    weights = frozenset(row.extra.get("total_variation") for row in rows)
    empty = any(row.extra.get("residual") == EMPTY for row in rows)
    updates = round(sum(row.value or 0 for row in alone))
    optimisers = (OPTIMISER.search(str(row.extra.get("update"))) for row in rows)
    colour = any(row.metric == "pictures" and row.note == COLOUR for row in rows)
    return Strength(name, updates, weights, tuned, empty, next((match[1] for match in optimisers if match), ""), colour)


def pools(row: Row) -> bool:
    """Return True if a row joins the clients of a round, which also have rows of their own."""
    return row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def list_missing(attacks: Sequence[Strength], defense: str, base: str = "") -> list[str]:
    """Return the evidence without which nothing recognised is no sign of safety; `base` is the base pruning."""
    missing, modes = [], list_modes(defense, base, [attack.name for attack in attacks])
    met = _with_magnitudes({attack.mode for attack in attacks})
    if unmet := [mode for mode in modes if mode not in met]:
        weak = ", ".join(map(settings_of_mode, unmet))
        how = "it was attacked plainly only" if not met - {PLAIN} else "not every attacker who knows of it was met"
        missing.append(f"{how}; one who knows of it ({weak}) may see more")
    if all(attack.empty for attack in attacks):
        missing.append("its residual was empty, as in a first round; one from training (rounds_before) was not met")
    for rule in sorted({attack.optimiser for attack in attacks}):
        strong = [name for name, entry in methods("inversion").items() if entry.info.get("strong_on") == rule]
        if strong and not any(name_of(attack.name) in strong for attack in attacks):
            missing.append(f"of steps of {rule} {' or '.join(strong)} may see more, and was not met")
    searches = [attack for attack in attacks if attack.colour and attack.smooth is not None]
    for smooth, name in ((False, "ig"), (True, SMOOTH)):  # on some networks one sees far more, on others the other
        lack = {attack.mode for attack in searches} - {attack.mode for attack in searches if attack.smooth is smooth}
        if names := [name if mode == PLAIN else f"{name}:{settings_of_mode(mode)}" for mode in sorted(lack)]:
            missing.append(f"of colour pictures {' or '.join(names)} may see more, and was not met")
    for mode in [mode for mode in modes if mode in met] or sorted(met):
        same = [attack for attack in attacks if attack.mode == mode or mode == MAGNITUDES in attack.mode]
        if all(attack.cut for attack in same):
            missing.append(str(same[0].cut))
        weights = {weight for attack in same for weight in attack.weights}
        if not any(attack.tuned for attack in same) and not weights >= set(WEIGHTS):
            missing.append(f"{same[0].name} had a fixed weight of total variation, not one chosen for such pictures")
    updates, fewest = max(attack.updates for attack in attacks), fewest_updates()
    if updates < fewest:
        missing.append(
            f"{updates} update{'s' if updates != 1 else ''} attacked; pictures are told apart from {fewest} on"
        )
    return list(dict.fromkeys(missing))


def name_unmet(defense: str, attacks: Iterable[str], base: str = "") -> str:
    """Return the adaptive attackers known against a defense, on top of a base pruning, that are not among these.

    Example:
        >>> name_unmet("dgp", ["ig", "ig:adaptive=support"]), name_unmet("noise", ["ig"])
        ('did not meet adaptive=reapply', '')
        >>> name_unmet("random", ["rob", "sgi:adaptive=support:follows=true"])
        'did not meet adaptive=fill'
    """
    unmet = list_unmet(defense, attacks, base)
    return f"{UNMET}{', '.join(map(settings_of_mode, unmet))}" if unmet else ""


def list_unmet(defense: str, attacks: Iterable[str], base: str = "", able: bool = False) -> list[str]:
    """Return the adaptive modes known against a defense that are not among these attacks; `able`: that these can have.

    Example:
        >>> list_unmet("random", ["rob"]), list_unmet("random", ["rob"], able=True)
        (['support+follows', 'fill'], ['fill'])
    """
    attacks = list(attacks)
    met, known = _with_magnitudes(set(map(read_mode, attacks))), list_modes(defense, base, attacks)
    entries = [entry for attack in attacks if (entry := _find(attack))]
    possible = {mode for entry in entries for mode in entry.info.get("adapts", known)}
    return [mode for mode in known if mode not in met and (mode in possible or not able)]


def name_missing_members(
    defense: str, attacks: Iterable[str], *, adaptive: bool = False, in_out: int = 0, flags: bool = True
) -> str:
    """Return the strongest attacker known on the members of a model with this defense, if these attacks are not it.

    Args:
        defense: of the model's training; `none` or `given` without one.
        attacks: the attacks that were run, written with their settings.
        adaptive: True if the attacker's models have the defense too.
        in_out: number of the attacker's in-out models; 0 for disjoint shadows.
        flags: False leaves out the command's flags, where it is no command that would help.

    Example:
        >>> name_missing_members("ppb", ["conf"], flags=False)
        'did not meet lira or rmia on 16 in-out models that have the same defense'
        >>> name_missing_members("ppb", ["conf", "rmia"], adaptive=True, in_out=16)
        ''
    """
    hidden = hides_members(defense)
    if in_out >= IN_OUT and (adaptive or not hidden) and any(map(_learns_online, attacks)):
        return ""
    strongest = AGAINST_TRAINING if hidden else AGAINST_NOTHING
    return UNMET + (strongest if flags else FLAGS.sub("", strongest))


def name_missing_clients(attacks: Iterable[str], *, federations: int = 0) -> str:
    """Return the strongest attacker known on the members of sub-models' clients, if these attacks are not it.

    Args:
        attacks: the attacks that were run, written with their settings.
        federations: number of the attacker's shadow federations; 0 for shadow clients of one turn.

    Example:
        >>> name_missing_clients(["yeom", "lira"], federations=8), name_missing_clients(["yeom"], federations=8)[:20]
        ('', 'did not meet lira or')
    """
    met = federations >= SHADOW_FEDERATIONS and any(map(_learns_online, attacks))
    return "" if met else UNMET + AGAINST_SUBMODELS


def read_unmet(note: str | None) -> str:
    """Return the part of a row's note that names attackers which were not met; empty without one.

    Example:
        >>> read_unmet("ties; did not meet rmia"), read_unmet(None)
        ('did not meet rmia', '')
    """
    return next((part for part in (note or "").split("; ") if part.startswith(UNMET)), "")


def hides_members(defense: str) -> bool:
    """Return True if an attacker on members does better with models of its own that have this defense.

    Example:
        >>> hides_members("basic"), hides_members("ppb+adv"), hides_members("given")
        (False, True, False)
    """
    known = methods("defense")
    return any(
        IMITATING in entry.info["strongest"] for part in defense.split("+") if (entry := known.get(name_of(part)))
    )


def _learns_online(attack: str) -> bool:
    """Return True if an attack compares models with and without each example."""
    return name_of(attack) in ("lira", "rmia") and read_settings(attack).get("mode") != "offline"


def _with_magnitudes(modes: set[str]) -> set[str]:
    """Return the modes, with that of reading squared gradients if one has it as a part."""
    return modes | {MAGNITUDES for mode in modes if MAGNITUDES in mode}


def list_modes(defense: str, base: str = "", attacks: Iterable[str] = ()) -> list[str]:
    """Return the adaptive modes that a defense, on top of a base pruning, is known to be weak against.

    fill needs a tampered model, so it is among them only if one of `attacks` has it.

    Example:
        >>> list_modes("dgp:k1=0.05+error-feedback"), list_modes("noise"), list_modes("largest", "prunefl:rate=0.3")
        (['support', 'reapply', 'support+follows'], [], ['support+follows', 'magnitudes'])
    """
    known = methods("defense")
    entries = [entry for part in defense.split("+") if (entry := known.get(name_of(part)))]
    fills = any(FILL in entry.info.get("adapts", ()) for entry in map(_find, attacks) if entry is not None)
    modes = [mode for entry in entries for mode in entry.info.get("adaptive", ()) if mode != FILL or fills]
    withholds = any(entry.info["acts_on"] == "client" for entry in entries)
    return list(dict.fromkeys([*modes, *[MAGNITUDES] * (withholds and sends_squares(base))]))


def _find(attack: str) -> Method | None:
    """Return the method of an attack that is written with its settings; None if there is none of its name."""
    return methods("inversion").get(name_of(attack))


def sends_squares(base: str) -> bool:
    """Return True if a base pruning makes clients send squared gradients of the weights that they withhold too.

    Example:
        >>> sends_squares("prunefl:rate=0.3"), sends_squares("prunefl:squares=shared"), sends_squares("snip")
        (True, False, False)
    """
    entry = methods("base-pruning").get(name_of(base))
    return entry is not None and getattr(entry.make, "wants_squares", False) and "squares=shared" not in split(base)
