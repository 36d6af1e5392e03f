"""Methods as a user writes them: `name`, `name:key=value`, several joined by `+`; unusable combinations are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from secateur import catalogue
from secateur.catalogue import Choice, Compressor, Defense
from secateur.config.messages import explain, yaml_value
from secateur.errors import WrongInput, unknown

UPDATES = ("upload", "residual", "inputs", "model")  # `acts_on` of defenses that act on the client's update
SENT = ("upload", "residual")  # those of them that rewrite an update
TRAINED = "loss"  # `acts_on` of defenses of a model's training that a client's update may have too
FEDERATED = ("client",)  # `acts_on` of defenses that only a federation has


def choice(kind: str, value: Any) -> Choice:
    """Read a choice from `name`, `name:key=value` or `{name: ..., key: ...}`; refuse unknown names and keys.

    Errors name the kind as run files do: `attack` for an inversion attack.
    """
    if isinstance(value, Choice):
        return value
    field = catalogue.FIELDS.get(kind, kind)
    if isinstance(value, str):
        name, *pairs = catalogue.split(value)
        if ":" in name:
            raise WrongInput(field, f"{value!r} is not readable; write name or name:key=value")
        arguments = {
            key: yaml_value(f"{field}.{name}.{key}", text) for key, text in (pair.split("=", 1) for pair in pairs)
        }
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        name, arguments = value["name"], {str(key): item for key, item in value.items() if key != "name"}
    else:
        raise WrongInput(field, f"{value!r} is not readable; write name, name:key=value or {{name: ..., key: ...}}")
    entry = catalogue.find(kind, name)
    for key in arguments:
        if key not in entry.defaults:
            raise unknown(f"{field}.{name}", key, entry.defaults or ["(it has no hyper-parameters)"])
    hints = get_type_hints(entry.make)
    for key in arguments:  # the annotation of a hyper-parameter is its schema; `1e-4` becomes a number here
        try:
            arguments[key] = TypeAdapter(hints[key]).validate_python(arguments[key])
        except ValidationError as error:
            raise explain(error, f"{field}.{name}.{key}", hints[key]) from None
    try:
        entry(**arguments)  # the method checks its hyper-parameters now
    except WrongInput as error:  # a run file may have a field of the same name, such as alpha
        parameter = f"{field}.{name}.{error.field}" if error.field in arguments else error.field
        raise WrongInput(parameter, error.message) from None
    return Choice(kind, name, tuple(sorted(arguments.items())))


def compressor(value: Any) -> Compressor:
    """Read a compressor, or two joined by `+`: a pruner or a smaller network first, then another form of it."""
    if isinstance(value, Compressor):
        return value
    if isinstance(value, Choice):
        return Compressor((value,))
    texts = value.split("+") if isinstance(value, str) else [value]
    if "none" in texts:
        problem = "none is the original, which is measured beside every compressor"
        raise WrongInput("pruner", f"{problem}; leave it out, or name int8 alone to quantise without pruning")
    parts = tuple(choice("pruner", text) for text in texts)
    converts = [hasattr(part.method.make, "convert") for part in parts]  # Converter; the schema imports no torch
    if converts not in ([False], [True], [False, True]):
        names = " and ".join(part.name for part in parts)
        allowed = "join one pruner, torch-pruning or distil with int8 after it, as in l1-structured+int8"
        raise WrongInput("pruner", f"{names} cannot be joined; {allowed}")
    return Compressor(parts)


def check_together(compressors: Sequence[Compressor], defenses: Sequence[Defense]) -> None:
    """Refuse a defense that would not act: int8 alone has no fine-tuning, and distil has a training of its own."""
    for part in (part for defense in defenses for part in defense.parts if part.name != "basic"):
        target = part.method.info["acts_on"]
        for chosen in compressors:
            first = chosen.parts[0].name
            if first == "int8" and target != "training":
                problem = f"{part.name} acts on fine-tuning, which int8 does not have"
                raise WrongInput("defense", f"{problem}; join int8 to a pruner, as in l1-unstructured+int8")
            if first == "distil" and target not in ("loss", "recipe"):
                problem = f"{part.name} replaces the training of the student"
                raise WrongInput("defense", f"{problem}; distil goes with basic, none and ppb")


def defense(value: Any) -> Defense:
    """Read a defense, or several joined by `+`; refuse defenses that cannot act together, with the reason."""
    if isinstance(value, Defense):
        return value
    texts = value.split("+") if isinstance(value, str) else [value]
    parts = tuple(choice("defense", text) for text in texts)
    if len(parts) > 1:
        for part in parts:
            if part.method.info.get("combines") is False:
                raise WrongInput("defense", f"{part.name} {part.method.info['reason']}")
        targets = [part.method.info["acts_on"] for part in parts]
        if len(set(targets)) < len(targets) or "recipe" in targets:
            names = " and ".join(f"{part.name} ({target})" for part, target in zip(parts, targets, strict=True))
            raise WrongInput("defense", f"{names} cannot be combined; join defenses that act on different targets")
    return Defense(parts)


def defense_of_models(value: Any) -> Defense:
    """Read a defense of a trained model; refuse one that acts on updates."""
    parsed = defense(value)
    _refuse(parsed, FEDERATED, "acts on the clients of a federation; use secateur federate")
    _refuse(parsed, UPDATES, "acts on updates; use secateur invert")
    return parsed


def defense_of_updates(value: Any) -> Defense:
    """Read a defense of a client's update, or `none`; refuse one that acts on training."""
    from secateur.defenses.error_feedback import upload_of

    parsed = defense(value)
    _refuse(parsed, FEDERATED, "acts on the clients of a federation; use secateur federate")
    for part in parsed.parts:
        if part.method.info["acts_on"] not in (*UPDATES, TRAINED) and part.name != "none":
            raise WrongInput("defense", f"{part.name} acts on training; use secateur audit or secateur prune")
    upload_of(parsed)  # refuses defenses that cannot be joined
    return parsed


def _refuse(parsed: Defense, targets: Sequence[str], sentence: str) -> None:
    """Refuse a defense of which a part acts on one of the targets."""
    for part in parsed.parts:
        if part.method.info["acts_on"] in targets:
            raise WrongInput("defense", f"{part.name} {sentence}")


def defense_of_clients(value: Any) -> Defense:
    """Read a defense of a federation's clients, or `none`: it withholds or rewrites values before they are sent."""
    from secateur.defenses.uploads import protection_of

    known = catalogue.methods("defense")
    here = [name for name in known if is_for_federations(name)]
    for name in (catalogue.split(part)[0] for part in value.split("+")) if isinstance(value, str) else ():
        if name not in known:
            raise unknown("defense", name, ["none", *here])
    parsed = defense(value)
    protection_of(parsed)  # refuses defenses that do not act here
    return parsed


def is_for_federations(name: str) -> bool:
    """Return True if a federation's clients can use the defense: it rewrites one update, whatever others send."""
    from secateur.defenses.uploads import find_aligned

    entry = catalogue.find("defense", name)
    target = entry.info["acts_on"]
    return target in (*SENT, *FEDERATED) and not (target == "upload" and find_aligned(entry()))


base_pruning = partial(choice, "base-pruning")


def inversion(value: Any, **parameters: Any) -> Choice:
    """Read an attack on updates; `parameters` replace hyper-parameters of `value`."""
    chosen = choice("inversion", value)
    if not parameters:
        return chosen
    return choice("inversion", {"name": chosen.name, **dict(chosen.arguments), **parameters})


def set_parameters(attacks: Sequence[Choice], **parameters: Any) -> list[Choice]:
    """Set hyper-parameters in every attack that has them; refuse one that no attack has."""
    for name in parameters:
        if attacks and not any(name in attack.method.defaults for attack in attacks):
            raise WrongInput(name, f"{attacks[0].name} does not have it; leave it out, or use attacks that have it")
    chosen = []
    for attack in attacks:
        known = {name: value for name, value in parameters.items() if name in attack.method.defaults}
        chosen.append(inversion(attack, **known))
    return list(dict.fromkeys(chosen))
