"""Run file of `secateur federate`: the fields of every federation, then those of sub-models.

With sub-models, smaller clients train parts of the server's model (mapp_fl). Other defaults apply then, and `attack`
names membership attacks on the models too; these become `exposure`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from secateur.catalogue import Choice, check_attack_kind, methods, name_of
from secateur.config import base
from secateur.config.base import Common, Fields, Limits, field, flag
from secateur.config.messages import Allowed, yaml_value
from secateur.config.methods import set_parameters
from secateur.errors import WrongInput, check_whole

SUBMODEL_DEFAULTS: dict[str, Any] = {  # mapp_fl's setting (Section 5.2)
    "model": "mapp-cnn-16",
    "rounds": 150,
    "partition": "dirichlet-sizes",
    "local_epochs": 1,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "averaging": "uniform",
}
SUBMODEL_CLIENTS = 10
PILOT_ROUNDS = 10
NOT_WITH_SUBMODELS = (
    *("method", "momentum", "weight_decay", "loss", "broadcast", "base_pruning", "server_rate"),
    *("server_momentum", "membership", "view", "fixed_batches"),
)
FOR_INVERSION = ("attack_every", "attack_at", "attack_clients", "labels")  # with sub-models
INSTEAD = {"membership": "use attack, for example yeom"}
ATTACKED_CLIENTS = "must be how many clients, all, or a list of clients such as [3] or 3,7"


def split_rules(value: Any) -> Any:
    """Return comma-separated rules as a list, in which `none` (FedAvg) is a rule too; refuse an empty text."""
    rules = base.split_values(value) if isinstance(value, str) else value
    if isinstance(value, str) and not rules:
        raise WrongInput("submodels", "is empty; use rules such as mapp-fl, or none for FedAvg")
    return rules


def split_membership(value: Any) -> Any:
    """Return membership attacks as a list; refuse inversion attacks, which `attack` takes."""
    attacks = base.split_unless_none(value)
    for attack in attacks:
        check_attack_kind("membership", "attack", str(attack))
    return attacks


def read_clients(value: Any) -> Any:
    """Read the clients to attack: `2` is how many of a round's clients, `2,7` or `[2]` are which of them."""
    if isinstance(value, str) and value != "all":
        return yaml_value("attack_clients", f"[{value}]" if "," in value and not value.startswith("[") else value)
    return value


Clients = Annotated[int, Field(ge=1, strict=True)] | Literal["all"] | Annotated[list[int], Field(min_length=1)]


class FaultFields(Fields):
    """Faults in the rounds of a federation (federated/faults.py)."""

    drop_out: float = field(0.0, "Probability that a client sends nothing.")
    nan: float = field(0.0, "Probability that a client sends NaN.")
    shape: float = field(0.0, "Probability that a client sends a tensor of the wrong shape.")
    deadline: float | None = field(None, "Seconds after which the server no longer waits; null: it waits.")
    step_seconds: float = field(1.0, "Seconds of a local step of the median client.")
    spread: float = field(0.5, "Standard deviation of the logarithm of the clients' speeds.")


class FederationFields(Common):
    """The fields of every federation."""

    model: str = flag("conv-2", base.MODEL)
    rounds: base.Count = flag(100, "Number of rounds.")
    clients: base.Count | None = flag(None, "Number of clients. By default 20, or one for every writer.")
    per_round: base.Count = flag(lambda fields: min(10, fields.get("clients") or 10), "Number of clients in a round.")
    partition: Literal["iid", "dirichlet-labels", "dirichlet-sizes", "writer", "writer-groups", "shared"] = flag(
        "iid", "Data of the clients: iid, dirichlet-labels, dirichlet-sizes, writer, writer-groups or shared."
    )
    client_rows: base.Count = flag(8, "Rows of a client of the partition shared; others may have them too.")
    alpha: base.Positive = field(0.85, "Concentration of either Dirichlet partition.")
    method: Literal["fedavg", "fedsgd"] = flag("fedavg", "fedavg or fedsgd.")
    local_steps: base.Count | None = flag(None, "Steps of a client in a round. By default 5, or local epochs.")
    local_epochs: base.Count | None = flag(None, "Epochs of a client in a round, instead of steps.")
    batch_size: base.Count = flag(20, "Examples in a step.")
    learning_rate: base.Positive = flag(0.1, "Learning rate of the clients.")
    momentum: base.Share = field(0.0, "Momentum of the clients.")
    weight_decay: base.NotNegative = field(0.0, "Weight decay of the clients.")
    loss: Literal["cross-entropy", "binary"] = field("cross-entropy", "Loss; binary is PruneFL's on one-hot labels.")
    averaging: Literal["coverage", "weighted", "uniform"] = flag(
        "coverage", "Average of the updates: coverage (over the clients that sent a value), weighted or uniform."
    )
    broadcast: Literal["masked", "dense"] = flag("masked", "Model that the server sends: masked or dense.")
    base_pruning: Annotated[list[base.OneBasePruning], *base.MANY] = flag(
        "none", "Base prunings, such as snip, prunefl (secateur list base-prunings).", repeat=True
    )
    defense: base.ClientDefenses = flag(
        "none", "Defenses, such as priprune, dgp (secateur list defenses).", repeat=True
    )
    server_rate: base.Positive = field(1.0, "Learning rate of the server.")
    server_momentum: base.Share = field(0.0, "Momentum of the server.")
    faults: FaultFields = field(FaultFields, "Faults of clients.")
    engine: Literal["here", "flower"] = flag("here", "here, or flower: Flower's simulation.")
    deadline: base.Positive = flag(300.0, "Seconds that a round of flower waits for answers.")
    evaluate_every: base.Count = flag(10, "Rounds from one evaluation to the next.")
    attack: Annotated[list[base.OneInversion], *base.ANY] = flag(
        "none",
        "Inversion attacks on updates, such as sgi, gi-priprune (secateur list attacks). "
        "With --submodels membership attacks on models too, such as yeom.",
        repeat=True,
    )
    membership: Annotated[list[Literal["yeom", "lira", "rmia"]], BeforeValidator(split_membership)] = flag(
        "none", "Membership attacks on updates: yeom, lira, rmia. With --submodels use --attack.", repeat=True
    )
    attack_every: base.Count | None = flag(None, "Rounds from one attack to the next. By default only the last.")
    attack_at: Annotated[list[base.Count], *base.ANY] = flag("none", "Rounds to attack, such as 5,10,20.", repeat=True)
    attack_clients: Annotated[Clients, BeforeValidator(read_clients), Allowed(ATTACKED_CLIENTS)] = flag(
        1, "Clients of a round to attack: how many (2, all), or which ([3] or 3,7)."
    )
    attack_history: base.Count = flag(1, "Rounds of a client that an attack uses together.")
    fixed_batches: bool = flag(False, "Clients use the same rows in every round.")
    view: Literal["update", "sum"] = flag("update", "Server's view: update, or sum as under secure aggregation.")
    iterations: base.Count | None = flag(None, base.ITERATIONS)
    labels: Literal["inferred", "oracle"] = flag("inferred", base.LABELS)
    generator_steps: base.Count = field(2000, "Training steps of the generator of attacks such as ggl.")
    generator_width: base.Count = field(64, "Width of this generator.")
    images: bool = flag(True, base.IMAGES)
    seeds: base.Seeds = flag(1, base.NUMBER_OF_SEEDS)
    limits: Limits = field(Limits, "Upper limits on leakage; exit code 1 above one of them, 3 if it is inconclusive.")


class SubmodelFields(FederationFields):
    """The fields of sub-models, which have no effect without a rule."""

    submodels: Annotated[list[base.OneSubmodel], BeforeValidator(split_rules)] = flag(
        [], "Rules that cut sub-models, such as mapp-fl (secateur list submodels).", repeat=True
    )
    large_clients: base.FromZero = flag(2, "Number of clients, those with most data, that train the whole model.")
    client_widths: Annotated[list[float], *base.MANY] = flag(
        0.5, "Shares of channels of the others, such as .5,.25.", repeat=True
    )
    client_rates: Annotated[list[Annotated[float, Field(gt=0, le=1)]], *base.ANY] = field(
        "none", "Share of channels of every client, in their order; replaces large_clients and client_widths."
    )
    uncovered: Literal["keep", "zero"] = flag("keep", "Weights that no client trained: keep or zero.")
    batchnorm: Literal["static", "reestimated"] = field("static", "BatchNorm statistics in tests.")
    scaler: bool = field(True, "Scale the activations of narrow layers (HeteroFL).")
    own_labels: bool = field(False, "A client trains only the classifier rows of its labels (HeteroFL).")
    augment: bool = flag(False, "Sub-models train on random crops and flips of pictures.")
    test_batch: Annotated[int, Field(ge=2)] = field(128, "Examples in a batch of a test.")
    redraw_sizes: bool = field(False, "Draw the clients' sizes for every seed, not once as in the paper.")
    exposure: Annotated[list[base.OneAttack], *base.ANY] = field("none", "Membership attacks; set by attack.")
    shadow_clients: Annotated[int, Field(ge=2)] = field(8, "The attacker's clients for lira and rmia.")
    shadow_federations: Annotated[int, Field(ge=0)] = field(
        0, "The attacker's federations for lira and rmia, as long as the attacked one. 0: shadow_clients, for one turn."
    )
    scoring: Literal["mixed", "apart", "fixed"] = field("mixed", "Batches that score examples under static BatchNorm.")
    knowledge: Literal["max", "min"] = field("max", "Known members, of 3 and 1 %; the paper prints min.")
    asks_known: bool = field(False, "Score the known members too, as in the paper.")
    advise: bool = flag(False, "Run pilots only, and advise which model size suits each client.")
    pilot_rounds: base.Count = field(PILOT_ROUNDS, "Rounds of a pilot. By default at most those of the run.")
    pilot_draws: base.Count = field(2, "Random assignments of sizes to clients.")


@cache
def _defaults() -> SubmodelFields:
    return SubmodelFields.model_validate({})


class Federate(SubmodelFields):
    """`secateur federate`: a federation that prunes, defends itself, and is attacked from inside."""

    @property
    def steps(self) -> int | None:
        """Local steps; None if local epochs are set."""
        if self.local_steps is None and self.local_epochs is None:
            return 1 if self.method == "fedsgd" else 5
        return self.local_steps

    @property
    def _learns(self) -> bool:
        """True if an attack on sub-models learns from shadows."""
        return any(attack.name != "yeom" for attack in self.exposure)

    @property
    def attacks(self) -> list[Choice]:
        """The attacks, with the run's `iterations` in every attack that has them."""
        return set_parameters(self.attack, **({} if self.iterations is None else {"iterations": self.iterations}))

    @model_validator(mode="before")
    @classmethod
    def _set_submodel_defaults(cls, fields: Any) -> Any:
        """Use the paper's values for unset fields, if there are sub-models."""
        if not isinstance(fields, dict) or not fields.get("submodels"):
            return fields
        return _with_submodel_defaults(fields)

    @model_validator(mode="after")
    def _check(self) -> Federate:
        """Refuse fields that contradict one another."""
        # A run's own file sets all fields, so a field counts as set if it differs from its default.
        changed = {name for name in SubmodelFields.model_fields if getattr(self, name) != getattr(_defaults(), name)}
        if self.submodels:
            self._check_submodels(changed)
        else:
            for name in SubmodelFields.model_fields:
                if name in changed and name not in FederationFields.model_fields:
                    raise WrongInput("submodels", f"must be set with {name}, for example mapp-fl")
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "cannot be set in a federation; use learning_rate, batch_size and others")
        if self.execution == "ray":
            raise WrongInput("execution", "ray is not possible here; allowed: auto, sequential, stacked")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_steps", "cannot be combined with local_epochs; use one of them")
        if self.partition.startswith("writer") and self.clients is not None:
            raise WrongInput("clients", f"partition {self.partition} sets them; leave clients out")
        self._check_schedule(changed)
        _ = self.attacks  # refuses iterations if no attack has them
        return self

    def _check_submodels(self, changed: set[str]) -> None:
        if self.advise and len(self.exposure) != 1:
            raise WrongInput("attack", f"{len(self.exposure)} attacks are set; advise needs one, for example yeom")
        check_whole("shadow_clients", self.shadow_clients, 2, even=True)
        if self.shadow_federations:
            check_whole("shadow_federations", self.shadow_federations, 4, even=True)
            if self.advise or not self._learns:
                advice = "they are for the attacks lira and rmia, and not for advise"
                raise WrongInput("shadow_federations", f"{self.shadow_federations} would learn nothing; {advice}")
        for name in NOT_WITH_SUBMODELS:
            if name in changed:
                instead = INSTEAD.get(name, "leave it out")
                raise WrongInput(name, f"cannot be combined with submodels; {instead}")
        for name in FOR_INVERSION:
            if name in changed and not self.attack:
                raise WrongInput(name, "is of inversion attacks; add one to attack, for example ig, or leave it out")
        if self.advise and self.attack:
            raise WrongInput("attack", f"{self.attack[0].name} cannot be combined with advise; use one such as yeom")

    def _check_schedule(self, changed: set[str]) -> None:
        """Refuse a schedule of attacks that has no attack, or that contradicts itself."""
        for name in ("attack_every", "attack_at", "attack_clients", "attack_history"):
            if name in changed and not (self.attack or self.membership or self.exposure):
                raise WrongInput("attack", f"must be set with {name}, for example ig; or membership, for example yeom")
        if self.attack_at and self.attack_every is not None:
            raise WrongInput("attack_at", "cannot be combined with attack_every; use one of them")
        if self.attack_every is not None and self.attack_every > self.rounds:
            raise WrongInput("attack_every", f"{self.attack_every} is not allowed; there are {self.rounds} rounds")


def _with_submodel_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields over the paper's values; membership attacks in `attack` become `exposure`, by default Yeom's.

    The clients of a writer partition are the writers, so they get no number.
    """
    attack = fields.get("attack")
    defaults = SUBMODEL_DEFAULTS | {"exposure": "yeom"}
    if attack not in (None, []):
        names = base.split_unless_none(attack)
        inversions = [name for name in names if name_of(str(name)) in methods("inversion")]
        members = [name for name in names if name not in inversions]
        fields = fields | {"attack": inversions} | ({"exposure": members} if members or not inversions else {})
        defaults["exposure"] = "none"
    if "local_steps" in fields:
        defaults.pop("local_epochs")
    if not str(fields.get("partition")).startswith("writer"):
        defaults |= {"clients": SUBMODEL_CLIENTS, "per_round": fields.get("clients", SUBMODEL_CLIENTS)}
    if isinstance(rounds := fields.get("rounds"), int):
        defaults["pilot_rounds"] = max(1, min(PILOT_ROUNDS, rounds))
    return defaults | fields
