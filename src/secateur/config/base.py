"""The fields that every run file may set, the field types that run files share, and limits on leakage.

Every field has a description. A field that `flag` returns is also an option of the command line, and its
description is the option's help (cli/options.py). Torch is not imported before a run file is read, so help is fast.
"""

from __future__ import annotations

import dataclasses
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from secateur.catalogue import Choice, Compressor, Defense
from secateur.config.messages import MOST, Allowed, read_annotation
from secateur.config.methods import choice, compressor, defense_of_clients, defense_of_models, defense_of_updates
from secateur.errors import WrongInput

if TYPE_CHECKING:
    from secateur.data.scaling import DataForm
    from secateur.training.recipe import Recipe


SEVERAL = 10_000  # seeds, at most
SEEDS = "must be a number of seeds, at least 1, or a list of seeds such as 0,3,4"


def field(default: Any, description: str, **extra: Any) -> Any:
    """Return a field of run files with its description.

    Args:
        default: The value in the form that a user writes, or a function that returns it; pydantic validates it.
        description: One or two sentences.
        extra: The arguments of `flag`.
    """
    source = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**source, description=description, json_schema_extra=extra)


def flag(default: Any, description: str, repeat: bool = False) -> Any:
    """Return a field that is also a flag of the command line; a `repeat` flag may be repeated, and joins its values."""
    return field(default, description, flag=True, repeat=repeat)


def split_values(value: Any) -> Any:
    """Return a value as a list: text is split at commas, and one value is a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def split_unless_none(value: Any) -> Any:
    """Return the empty list for `none` and null, else the value as a list."""
    return [] if value in (None, "none", ["none"]) else split_values(value)


def read_seeds(value: Any) -> Any:
    """Return a list of seeds; a number N means the seeds 0 to N - 1."""
    if isinstance(value, str) and value.strip().removeprefix("-").isdigit():
        value = int(value)
    if isinstance(value, int) and value > SEVERAL:
        raise WrongInput("seeds", f"{value} is not allowed; {SEEDS}, at most {SEVERAL}")
    return list(range(value)) if isinstance(value, int) else split_values(value)


PLAIN, UNKNOWN = "sgd", "unknown"  # optimisers: gradient descent, and one that the attacker estimates


def read_optimiser(value: Any) -> Any:
    """Return the text of an optimiser without defaults; refuse an unreadable one."""
    if not isinstance(value, str) or value in (PLAIN, UNKNOWN):
        return value
    from secateur.training.optimisers import parse_optimiser, write_optimiser  # the schema imports no torch

    return write_optimiser(parse_optimiser(value))


MANY = (BeforeValidator(split_values), Field(min_length=1))
ANY = (BeforeValidator(split_unless_none),)
OneCompressor = Annotated[Compressor, BeforeValidator(compressor), PlainSerializer(str)]
OneBasePruning = Annotated[Choice, BeforeValidator(partial(choice, "base-pruning")), PlainSerializer(str)]
OneSubmodel = Annotated[Choice, BeforeValidator(partial(choice, "submodel")), PlainSerializer(str)]
OneAttack = Annotated[Choice, BeforeValidator(partial(choice, "attack")), PlainSerializer(str)]
OneInversion = Annotated[Choice, BeforeValidator(partial(choice, "inversion")), PlainSerializer(str)]
OneDefense = Annotated[Defense, BeforeValidator(defense_of_models), PlainSerializer(str)]
UpdateDefenses = Annotated[list[Annotated[Defense, BeforeValidator(defense_of_updates), PlainSerializer(str)]], *MANY]
ClientDefenses = Annotated[list[Annotated[Defense, BeforeValidator(defense_of_clients), PlainSerializer(str)]], *MANY]
OneOptimiser = Annotated[str, BeforeValidator(read_optimiser)]
Count = Annotated[int, Field(ge=1, le=MOST)]
FromZero = Annotated[int, Field(ge=0, le=MOST)]
Models = Annotated[int, Field(ge=0, le=10_000)]
Threads = Annotated[int, Field(ge=1, le=1024)]  # PyTorch ends the process where the system refuses more
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seeds = Annotated[list[FromZero], BeforeValidator(read_seeds), Field(min_length=1), Allowed(SEEDS)]
DEVICES = "auto, cpu, cuda or cuda:NUMBER"
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$"), Allowed(f"allowed: {DEVICES}")]

DATA = "Data set: a name (secateur list datasets), an .npz, .csv or .parquet file, an image folder or module:function."
DATA_FOLDER = "Folder of the data set's files. By default SECATEUR_DATA, else the cache."
MODEL = "Model: a name (secateur list models), module:function or timm:NAME."
ASKED_MODEL = f"{MODEL} As it is: a file (.onnx, .pt2, TorchScript .pt), hf:FOLDER or an address, http://..."
DEFAULT_MODEL = "digits-cnn"
IMAGES = "Show training pictures on the page, and save them in the folder."
NUMBER_OF_SEEDS = "Number of seeds (0, 1, ...), or a list of seeds such as 3,4."
ITERATIONS = "Iterations of every attack. By default those of its paper."
DETERMINISTIC = True  # default of audits: it costs 3 % or less on a GPU (benchmarks/deterministic.py)
REPEATABLE = "One seed gives equal results bit for bit on a GPU too; on a CPU it always does."
LABELS = "inferred, or oracle: the attacker knows the labels."


class Fields(BaseModel):
    """Frozen record of fields, which refuses fields that it does not have."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True, defer_build=True
    )


class Flag(NamedTuple):
    """Flag of the command line that sets a field."""

    name: str  # of the field
    kind: type  # bool, Path, or another type, whose values are written as text
    help: str
    repeat: bool

    @property
    def many(self) -> bool:
        """True if the value may be a list; a kind of None stands for several types, such as a number or a list."""
        return self.repeat or self.kind is None or get_origin(self.kind) is list


def flags_of(schema: type[Fields]) -> list[Flag]:
    """Return the flags of a schema, in the order of its fields."""
    flags = []
    for name, info in schema.model_fields.items():
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("flag"):
            kind, _, _ = read_annotation(info.annotation)
            flags.append(Flag(name, kind, info.description or "", bool(info.json_schema_extra["repeat"])))
    return flags


class Training(Fields):
    """Training of a model; the defaults are the paper's (samia_ppb 5.1)."""

    epochs: Count = field(100, "Largest number of epochs.")
    batch_size: Count = field(128, "Examples in a step.")
    optimiser: Literal["adam", "sgd"] = field("adam", "adam or sgd.")
    learning_rate: Positive = field(1e-3, "Learning rate.")
    momentum: Share = field(0.9, "Momentum of sgd.")
    weight_decay: NotNegative = field(5e-4, "Weight decay.")
    patience: Count | None = field(5, "Epochs without improvement before training stops; null: never.")
    monitor: Literal["loss", "accuracy"] = field("loss", "Measure of the rows for early stopping: loss or accuracy.")

    def apply_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the fields that the user set."""
        return dataclasses.replace(recipe, **{name: getattr(self, name) for name in self.model_fields_set})


class Common(Fields):
    """The fields that every run file may set."""

    schema_version: Literal[1] = Field(1, alias="schema", description="Version of the run file's schema.")
    model: str = flag(DEFAULT_MODEL, MODEL)
    weights: Path | None = flag(None, "Weights of a trained model (.safetensors, .pt, .pth).")
    data: str = flag("digits", DATA)
    data_folder: Path | None = flag(None, DATA_FOLDER)
    inputs_are: Literal["pixels", "normalised"] | None = flag(
        None, "Stored inputs are pixels, or normalised: as the model takes them."
    )
    mean: Annotated[list[float], *ANY] = flag("none", "Mean of each channel, for pixels in [0, 1].")
    std: Annotated[list[Positive], *ANY] = flag("none", "Deviation of each channel, for pixels in [0, 1].")
    transform: str | None = flag(None, "module:function from stored inputs, or pixels in [0, 1], to the model's.")
    resize: Count | None = flag(None, "Side in pixels to which the pictures of a folder are resized.")
    label: str = flag("label", "Column of the labels in a table.")
    classes: Count | None = flag(None, "Number of classes. By default the largest label and 1.")
    train_size: Count | None = flag(None, "Number of members: the first rows of the data.")
    download: bool = field(True, "Download a data set that is not in its folder.")
    examples: Count | None = field(None, "Largest number of rows of the data set, drawn at random.")
    train: Training = field(Training, "Training of the models.")
    finetune: Training = field(Training, "Fine-tuning after pruning.")
    device: Device = flag("auto", f"{DEVICES}.")
    threads: Threads = field(1, "CPU threads. Results are equal bit for bit only at the same number.")
    deterministic: bool = field(False, REPEATABLE)
    execution: Literal["auto", "sequential", "stacked", "ray"] = field("auto", "Training of many models.")

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        if bool(self.mean) != bool(self.std):
            missing = "std" if self.mean else "mean"
            raise WrongInput(missing, "is missing; mean and std are only used together")
        if self.transform is not None and (self.mean or self.inputs_are is not None):
            raise WrongInput("transform", "cannot be combined with inputs_are, mean or std; leave them out")
        return self

    @property
    def form(self) -> DataForm:
        """The user's description of the data."""
        from secateur.data.scaling import DataForm

        scaling = (self.inputs_are, tuple(self.mean), tuple(self.std), self.transform)
        return DataForm(*scaling, self.resize, self.label, self.classes, self.train_size)

    def recipes(self, tabular: bool) -> tuple[Recipe, Recipe]:
        """Return the recipes of training and fine-tuning.

        Training takes at most 100 epochs for images and 50 for tables; fine-tuning takes half of that (samia_ppb 5.1).
        """
        from secateur.training.recipe import Recipe

        train = self.train.apply_to(Recipe(epochs=50 if tabular else 100))
        return train, self.finetune.apply_to(dataclasses.replace(train, epochs=max(1, train.epochs // 2)))


Limit = Annotated[float, Field(ge=0, le=1)] | None
Unit = Literal["example", "client"]


class Limits(Fields):
    """Upper limits on pruned and defended models, under every attack; None: no limit."""

    auc: Limit = None
    attack_accuracy: Limit = None
    balanced_accuracy: Limit = None
    advantage: Annotated[float, Field(ge=-1, le=1)] | None = None
    tpr_at_fpr_10: Limit = Field(None, alias="tpr_at_fpr_0.1")
    tpr_at_fpr_1: Limit = Field(None, alias="tpr_at_fpr_0.01")
    tpr_at_fpr_01: Limit = Field(None, alias="tpr_at_fpr_0.001")
    worst_group_auc: Limit = None
    worst_group_tpr: Limit = Field(None, alias="worst_group_tpr_at_fpr_0.01")
    accuracy_drop: Limit = None
    recognisable: Limit = field(None, "Share of pictures that an attack makes recognisable.")
    psnr: float | None = None
    label_accuracy: Limit = None
    epsilon: NotNegative | None = field(None, "Epsilon that the defense proves.")
    decide: Literal["high", "value", "low"] = field("high", "End of the interval that is held against a limit.")
    attacker: Literal["shadows", "no-shadows"] = field("shadows", "The attacker that the limits are meant for.")

    def by_measure(self) -> dict[str, float]:
        """Return the limits that are set, by the name of the measure."""
        return self.model_dump(by_alias=True, exclude_none=True, exclude={"decide", "attacker"})


class PrivacyClaim(Fields):
    """The privacy that a model's maker claims for its whole training."""

    epsilon: NotNegative = field(..., "Claimed epsilon.")
    delta: Annotated[float, Field(ge=0, lt=1)] = field(0.0, "Claimed delta.")
    unit: Unit = field("example", "Whose presence is hidden: one example, or one client.")


class PolicyFile(Fields):
    """A policy of an organisation: its limits, who set them, and until when they hold."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str = "policy"
    set_by: str = ""
    set_on: date | None = None
    review_by: date | None = field(None, "After this day the policy decides nothing.")
    limits: Limits
    claim: PrivacyClaim | None = field(None, "Privacy that is claimed for the models as they were brought.")
