"""The schema of run files: what may be set, what is allowed, and one clear sentence when something is wrong.

The only importer of pydantic. A run file is YAML; the command line's flags are laid over it, so both say the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from secateur import catalogue
from secateur.catalogue import Choice, Defense
from secateur.errors import WrongInput, unknown
from secateur.training import Recipe

UPDATES = ("upload", "residual", "inputs", "model")  # places of defenses that act where an update is made
FEDERATED = ("client",)  # places that only a federation has


class _Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)


def choice(kind: str, value: Any) -> Choice:
    """Read a choice from `name`, `name:key=value` or `{name: ..., key: ...}`; unknown names and keys are refused."""
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        name, *pairs = catalogue.split(value)
        if ":" in name:
            raise WrongInput(kind, f"{value!r} is not readable; write name or name:key=value")
        given = {key: _yaml(f"{kind}.{name}.{key}", text) for key, text in (pair.split("=", 1) for pair in pairs)}
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        name, given = value["name"], {str(key): item for key, item in value.items() if key != "name"}
    else:
        raise WrongInput(kind, f"{value!r} is not readable; write name, name:key=value or {{name: ..., key: ...}}")
    entry = catalogue.find(kind, name)
    for key in given:
        if key not in entry.defaults:
            raise unknown(f"{kind}.{name}", key, entry.defaults or ["(it has no hyper-parameters)"])
    hints = get_type_hints(entry.make)
    for key in given:  # the annotation of a hyper-parameter is its schema; `1e-4` becomes a number here
        try:
            given[key] = TypeAdapter(hints[key]).validate_python(given[key])
        except ValidationError as error:
            raise _sentence(error, f"{kind}.{name}.{key}") from None
    entry(**given)  # what a method itself refuses, it refuses now
    return Choice(kind, name, tuple(sorted(given.items())))


def defense(value: Any) -> Defense:
    """Read a defense, or several joined by `+`; what cannot act together is refused with the reason."""
    if isinstance(value, Defense):
        return value
    texts = value.split("+") if isinstance(value, str) else [value]
    parts = tuple(choice("defense", text) for text in texts)
    if len(parts) > 1:
        for part in parts:
            if part.method.info.get("combines") is False:
                raise WrongInput("defense", f"{part.name} {part.method.info['reason']}")
        places = [part.method.info["acts_on"] for part in parts]
        if len(set(places)) < len(places) or "recipe" in places:
            names = " and ".join(f"{part.name} ({place})" for part, place in zip(parts, places, strict=True))
            raise WrongInput("defense", f"{names} do not act together; join defenses that act on different places")
    return Defense(parts)


def defense_of_models(value: Any) -> Defense:
    """A defense of a trained model; one that acts on updates is refused."""
    made = _outside_federations(defense(value))
    for part in made.parts:
        if part.method.info["acts_on"] in (*UPDATES, "client"):
            command = "federate" if part.method.info["acts_on"] == "client" else "invert"
            raise WrongInput("defense", f"{part.name} acts on updates; use secateur {command}")
    return made


def defense_of_updates(value: Any) -> Defense:
    """A defense of what a client sends, or `none`; one that acts on training is refused."""
    from secateur.defenses.error_feedback import upload_of

    made = _outside_federations(defense(value))
    for part in made.parts:
        if part.method.info["acts_on"] not in UPDATES and part.name != "none":
            raise WrongInput("defense", f"{part.name} acts on training; use secateur audit or secateur prune")
    upload_of(made)  # what cannot be joined is refused now
    return made


def _outside_federations(made: Defense) -> Defense:
    for part in made.parts:
        if part.method.info["acts_on"] in FEDERATED:
            raise WrongInput("defense", f"{part.name} acts on the clients of a federation; use secateur federate")
    return made


def defense_of_clients(value: Any) -> Defense:
    """A defense of a federation's clients, or `none`: what is withheld or rewritten before it is sent."""
    from secateur.federated.terms import protection_of

    made = defense(value)
    protection_of(made)  # what does not act here is refused now
    return made


def base_pruning(value: Any) -> Choice:
    """Read what a federation prunes by."""
    try:
        return choice("base-pruning", value)
    except WrongInput as error:  # a user knows the flag
        raise WrongInput(error.field.replace("base-pruning", "base_pruning", 1), error.message) from None


def inversion(value: Any, **over: Any) -> Choice:
    """Read an attack on updates; `over` are hyper-parameters that are laid over its own."""
    try:
        chosen = choice("inversion", value)
        return choice("inversion", {"name": chosen.name, **dict(chosen.arguments), **over}) if over else chosen
    except WrongInput as error:  # a user knows it as an attack
        raise WrongInput(error.field.replace("inversion", "attack", 1), error.message) from None


def _none_or_many(value: Any) -> Any:
    """`none` means none of them."""
    return [] if value in ("none", ["none"]) else _listed(value)


def _listed(value: Any) -> Any:
    """Lists are comma-separated in text, and one value is a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _default(text: str | int) -> Any:
    """A default in the form a user writes; pydantic validates it like any other value."""
    return Field(default=text)


def _seeds(value: Any) -> Any:
    """A number N means the seeds 0 to N - 1."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    return list(range(value)) if isinstance(value, int) else _listed(value)


OnePruner = Annotated[Choice, BeforeValidator(partial(choice, "pruner")), PlainSerializer(str)]
OneDefense = Annotated[Defense, BeforeValidator(defense_of_models), PlainSerializer(str)]
OneUpdateDefense = Annotated[Defense, BeforeValidator(defense_of_updates), PlainSerializer(str)]
OneClientDefense = Annotated[Defense, BeforeValidator(defense_of_clients), PlainSerializer(str)]
OneBasePruning = Annotated[Choice, BeforeValidator(base_pruning), PlainSerializer(str)]
OneAttack = Annotated[Choice, BeforeValidator(partial(choice, "attack")), PlainSerializer(str)]
OneInversion = Annotated[Choice, BeforeValidator(inversion), PlainSerializer(str)]
Sparsity = Annotated[float, Field(ge=0, lt=1)]
_MANY = (BeforeValidator(_listed), Field(min_length=1))


class Training(_Base):
    """How a model is trained; what isn't given is the paper's (samia_ppb 5.1)."""

    epochs: Annotated[int, Field(ge=1)] = 100
    batch_size: Annotated[int, Field(ge=1)] = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    patience: Annotated[int, Field(ge=1)] | None = 5

    def over(self, base: Recipe) -> Recipe:
        """The base recipe with what was given laid over it."""
        return dataclasses.replace(base, **{name: getattr(self, name) for name in self.model_fields_set})


class Limits(_Base):
    """What the pruned and defended models may give away at most, under every attack; None is no limit."""

    auc: Annotated[float, Field(ge=0, le=1)] | None = None
    attack_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    balanced_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    advantage: Annotated[float, Field(ge=-1, le=1)] | None = None
    tpr_at_fpr_10: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, alias="tpr_at_fpr_0.1")
    tpr_at_fpr_1: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, alias="tpr_at_fpr_0.01")
    tpr_at_fpr_01: Annotated[float, Field(ge=0, le=1)] | None = Field(default=None, alias="tpr_at_fpr_0.001")
    accuracy_drop: Annotated[float, Field(ge=0, le=1)] | None = None

    def given(self) -> dict[str, float]:
        """Those that are set, by the measure's name."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Common(_Base):
    """What every run file may set."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str = "digits-cnn"  # a name of ours, or module:function
    weights: Path | None = None  # .safetensors of a trained model
    data: str = "digits"  # a name, an .npz, an image folder, or module:function
    data_folder: Path | None = None  # where the data set's files are; else SECATEUR_DATA, else the cache
    download: bool = True
    examples: Annotated[int, Field(ge=1)] | None = None  # at most so many rows of the data set, drawn at random
    train: Training = Training()
    finetune: Training = Training()
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Annotated[int, Field(ge=1)] = 1  # results are equal bit for bit only at one thread count
    way: Literal["auto", "sequential", "stacked", "ray"] = "auto"

    def recipes(self, tabular: bool) -> tuple[Recipe, Recipe]:
        """Training and fine-tuning: at most 100 epochs for images, 50 for tables, and half of that (samia_ppb 5.1)."""
        train = self.train.over(Recipe(epochs=50 if tabular else 100))
        return train, self.finetune.over(dataclasses.replace(train, epochs=max(1, train.epochs // 2)))


Protocol = Literal["known", "unknown-sparsity", "unknown", "select"]


class Audit(Common):
    """`secateur audit`: what do these ways of pruning give away?"""

    predictions: Path | None = None  # saved answers (.npz or .csv), audited without any model
    pruner: Annotated[list[OnePruner], BeforeValidator(_none_or_many)] = _default(
        "l1-unstructured,l1-structured,l2-structured,slimming"
    )
    sparsity: Annotated[list[Sparsity], *_MANY] = [0.7]
    defense: Annotated[list[OneDefense], *_MANY] = _default("basic")
    attack: Annotated[list[OneAttack], *_MANY] = _default("conf,mentr")
    adaptive: bool = False  # the attacker's shadows use the defense too
    protocol: Protocol = "known"  # what the attacker knows of the pruning
    experiments: Annotated[int, Field(ge=1)] = 20  # random pairs of the protocol `unknown`
    shadows: Annotated[int, Field(ge=1)] = 5
    in_out: Annotated[int, Field(ge=0)] = 0  # models over the victim's own pool, for online LiRA and RMIA
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_seeds), Field(min_length=1)] = _default(1)
    limits: Limits = Limits()

    @property
    def trains_shadows(self) -> bool:
        """Whether the attacker's models can be trained: a model given without a recipe says nothing of how."""
        return self.weights is None or "train" in self.model_fields_set

    @model_validator(mode="after")
    def _checked(self) -> Audit:
        if self.protocol == "select" and self.shadows < 2:
            raise WrongInput("shadows", f"{self.shadows} is not allowed; protocol select needs at least 2")
        if self.in_out % 2:
            raise WrongInput("in_out", f"{self.in_out} is not allowed; give an even number: each example is in half")
        if self.protocol != "known" and not self.pruner:
            raise WrongInput("pruner", f"protocol {self.protocol} needs at least one pruner")
        return self


class Prune(Common):
    """`secateur prune`: make one pruned, fine-tuned model."""

    pruner: OnePruner = _default("l1-unstructured")
    sparsity: Sparsity = 0.7
    defense: OneDefense = _default("basic")
    remove: bool = False  # take dead channels out for real
    seed: Annotated[int, Field(ge=0)] = 0


class Invert(Common):
    """`secateur invert`: what does one update reveal?"""

    model: str = "lenet-zhu"
    update: Path | None = None  # one captured elsewhere (.safetensors); then there is no truth to compare with
    defense: Annotated[list[OneUpdateDefense], *_MANY] = _default("none")
    residual: Path | None = None  # what error feedback kept in a training (.safetensors); None: nothing yet
    attack: Annotated[list[OneInversion], *_MANY] = _default("ig")
    targets: Annotated[int, Field(ge=1)] = 20  # updates that are attacked
    batch_size: Annotated[int, Field(ge=1)] = 1  # examples in each
    labels: Literal["inferred", "oracle"] = "inferred"  # whether the attacker is told them
    adaptive: Literal["none", "support", "layer", "reapply", "mask"] = "none"
    restarts: Annotated[int, Field(ge=1)] | None = None  # None: the attack's own
    iterations: Annotated[int, Field(ge=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None  # the client sends its weights after these; None: a gradient
    local_batch: Annotated[int, Field(ge=1)] | None = None  # examples a local step takes; None: all
    learning_rate: Annotated[float, Field(gt=0)] | None = None  # of the local steps; None: 0.1, of a file unknown
    batchnorm: Literal["eval", "batch"] = "eval"  # by which statistics the client normalises
    statistics: bool = False  # the attacker is told those of the batch: a much stronger one
    generator_steps: Annotated[int, Field(ge=1)] = 2000  # of training the generator that an attack such as ggl needs
    generator_width: Annotated[int, Field(ge=1)] = 64
    images: bool = True  # the page and the folder show training pictures
    together: Annotated[int, Field(ge=1)] | None = None  # targets attacked at once; None: all on a GPU, else 10
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_seeds), Field(min_length=1)] = _default(1)

    @property
    def attacks(self) -> list[Choice]:
        """The attacks, each with the restarts, iterations and adaptive attacker that were asked of all."""
        asked = {"restarts": self.restarts, "iterations": self.iterations, "adaptive": self.adaptive}
        over = {name: value for name, value in asked.items() if value not in (None, "none")}
        for attack, name in ((attack, name) for attack in self.attack for name in over):
            if name not in attack.method.defaults:
                raise WrongInput(name, f"{attack.name} has none; leave it out, or choose attacks that have it")
        return list(dict.fromkeys(inversion(attack, **over) for attack in self.attack))

    @model_validator(mode="after")
    def _checked(self) -> Invert:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "nothing is trained here; give the weights of a trained model: --weights FILE")
        if self.local_batch is not None and self.local_batch > self.batch_size:
            raise WrongInput("local_batch", f"{self.local_batch} is not allowed; batch_size is {self.batch_size}")
        if self.update is not None and self.weights is None:
            raise WrongInput("weights", "must be given with an update: the model that the server had sent")
        if self.update is not None and (self.labels == "oracle" or self.statistics):
            raise WrongInput("update", "comes without its truth; labels: oracle and statistics are not possible")
        if any(str(each) != "none" for each in self.defense):
            if self.update is not None:
                raise WrongInput("defense", "an update that was captured is made already; leave the defense out")
            if self.local_steps is not None:
                raise WrongInput("defense", "acts on a gradient, and local_steps send weights; leave one of them out")
        if self.residual is not None and not any(each.acting_on("residual") for each in self.defense):
            raise WrongInput("residual", "is what error feedback keeps; ask for it: --defense dgp+error-feedback")
        _ = self.attacks  # what an attack does not have is refused now
        return self


class Faulty(_Base):
    """What goes wrong in the rounds of a federation (federated/faults.py)."""

    drop_out: float = 0.0
    nan: float = 0.0
    shape: float = 0.0
    deadline: float | None = None
    step_seconds: float = 1.0
    spread: float = 0.5


class Federate(Common):
    """`secateur federate`: a federation that prunes, defends itself, and is attacked from inside."""

    model: str = "conv-2"
    rounds: Annotated[int, Field(ge=1)] = 100
    clients: Annotated[int, Field(ge=1)] | None = None  # None: 20, or one a writer
    per_round: Annotated[int, Field(ge=1)] = 10
    partition: Literal["iid", "dirichlet-labels", "dirichlet-sizes", "writer"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.85  # of either Dirichlet
    method: Literal["fedavg", "fedsgd"] = "fedavg"
    local_steps: Annotated[int, Field(ge=1)] | None = None  # None: 5, or epochs
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 20
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    loss: Literal["cross-entropy", "binary"] = "cross-entropy"  # binary: PruneFL's, on one-hot labels
    averaging: Literal["weighted", "uniform", "coverage"] = "weighted"
    broadcast: Literal["masked", "dense"] = "masked"
    base_pruning: Annotated[list[OneBasePruning], *_MANY] = _default("none")
    defense: Annotated[list[OneClientDefense], *_MANY] = _default("none")
    server_rate: Annotated[float, Field(gt=0)] = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    faults: Faulty = Faulty()
    evaluate_every: Annotated[int, Field(ge=1)] = 10
    attack: Annotated[list[OneInversion], BeforeValidator(_none_or_many)] = _default("none")
    attack_every: Annotated[int, Field(ge=1)] | None = None  # rounds; None: the last one
    iterations: Annotated[int, Field(ge=1)] | None = None  # of each attack; None: its own
    labels: Literal["inferred", "oracle"] = "inferred"  # whether the attacker is told them
    images: bool = True
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_seeds), Field(min_length=1)] = _default(1)

    @property
    def steps(self) -> int | None:
        """Local steps; None where there are epochs."""
        if self.local_steps is None and self.local_epochs is None:
            return 1 if self.method == "fedsgd" else 5
        return self.local_steps

    @property
    def attacks(self) -> list[Choice]:
        """The attacks, each with the iterations that were asked of all."""
        over = {} if self.iterations is None else {"iterations": self.iterations}
        return list(dict.fromkeys(inversion(attack, **over) for attack in self.attack))

    @model_validator(mode="after")
    def _checked(self) -> Federate:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "a federation trains by its own fields; set learning_rate, batch_size and others")
        if self.way == "ray":
            raise WrongInput("way", "ray is not possible here; give auto, sequential or stacked")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_steps", "give either local_steps or local_epochs, and not both")
        if self.partition == "writer" and self.clients is not None:
            raise WrongInput("clients", "partition writer makes one a writer; leave clients out")
        if self.attack_every is not None and not self.attack:
            raise WrongInput("attack", "must be given with attack_every, for example ig")
        if self.attack_every is not None and self.attack_every > self.rounds:
            raise WrongInput("attack_every", f"{self.attack_every} is not allowed; there are {self.rounds} rounds")
        _ = self.attacks  # what an attack does not have is refused now
        return self


C = TypeVar("C", bound=Common)


def read(kind: type[C], file: Path | None, flags: Mapping[str, Any], overrides: list[str] | None = None) -> C:
    """The run file with the flags laid over it, then `a.b=value` overrides; WrongInput says what is wrong."""
    given = _load(file) if file is not None else {}
    given |= {key: value for key, value in flags.items() if value is not None}
    for text in overrides or []:
        path, found, value = text.partition("=")
        if not found:
            raise WrongInput("set", f"{text!r} is not readable; write field=value or field.part=value")
        *parents, last = path.split(".")
        node = given
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise WrongInput("set", f"{text!r} is not possible: {parent} has no parts")
        node[last] = _yaml(path, value)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _sentence(error, model=kind) from None


def dump(config: Common) -> dict[str, Any]:
    """Plain values from which the same run can be started again, with the defaults written out.

    Of training and fine-tuning only what was given: the rest follows the kind of data and one from the other.
    """
    plain = config.model_dump(mode="json", by_alias=True, exclude={"train", "finetune"})
    for name in ("train", "finetune"):
        if name in config.model_fields_set:
            plain[name] = getattr(config, name).model_dump(mode="json", exclude_unset=True)
    return plain


def _yaml(field: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise WrongInput(field, f"{text!r} is not readable; write a number, a word or a YAML list") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongInput("config", f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WrongInput("config", f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise WrongInput("config", f"{file} must hold fields and values, not a {type(given).__name__}")
    return given


def _sentence(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> WrongInput:
    """The first of pydantic's complaints as one sentence that names the field and what is allowed."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    field = ".".join([prefix, *where] if prefix else where)
    if first["type"] == "extra_forbidden":
        for part in where[:-1]:
            inner = model.model_fields[part].annotation if model else None
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
        known = [f.alias or name for name, f in model.model_fields.items()] if model else []
        wrong = unknown("field", where[-1], known)
        return WrongInput(field, wrong.message)
    if first["type"] == "missing":
        return WrongInput(field, "must be given")
    return WrongInput(field, f"{first['input']!r} is not allowed; {first['msg'].lower()}")
