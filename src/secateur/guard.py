"""What a client does to its network, examples and gradient, and what must be said of a defense beside the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Generator, Tensor, nn

from secateur.attacks.inversion.updates import gradient_update
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.config import UPDATES
from secateur.defenses.accounting import Guarantee
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.error_feedback import INNER, ErrorFeedback, upload_of
from secateur.defenses.precode import Precode, bottleneck_of, with_bottleneck
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, Mask, Params, Transform, Turning, Upload
from secateur.models.create import misfit
from secateur.rows import Row


@dataclass(frozen=True, eq=False)
class Guard:
    """The upload of an attacked client."""

    upload: Upload
    residual: Params | None = None  # the state after a training with error feedback; None: before the first round
    seed: int = 0
    other: Callable[[int], Batch] | None = None  # of adgp: the batch of the user that broadcasts beside target i

    def __call__(self, gradient: Gradient, sent: Params, batch: Batch, number: int, knowledge: Knowledge) -> Gradient:
        """What leaves the client of one target; every attack on that target sees the same."""
        rng = derive(self.seed, "upload", number)
        turning = Turning(knowledge.net, sent, batch, 0, rng, knowledge.loss, knowledge.batchnorm)
        outside = self._outside(sent, number, knowledge)
        values, _ = self.upload(gradient.values, self._state(gradient.values), turning, **outside)
        return Gradient(values)

    def _outside(self, sent: Params, number: int, knowledge: Knowledge) -> dict[str, Mask]:
        """What adgp's client is told: I of the user that broadcasts, before its first residual, where it is another."""
        if not isinstance(self._inner, AlignedDualGradientPruning) or self._inner.chosen:
            return {}
        if self.other is None:
            raise WrongInput("defense", "adgp:chosen=false follows another user; give a batch of at least two updates")
        found = gradient_update(knowledge.net, sent, self.other(number), knowledge.batchnorm, knowledge.loss)
        return {"inside": self._inner.positions(found.values)}

    @property
    def _inner(self) -> Upload:
        return self.upload.inner if isinstance(self.upload, ErrorFeedback) else self.upload

    @property
    def compression(self) -> Callable[[Params], Params] | None:
        """What an attacker can apply to a trial's gradient, where the upload depends on the gradient alone."""
        found: Callable[[Params], Params] | None = getattr(self._inner, "compress", None)
        return found if getattr(self._inner, "chosen", True) else None

    def _state(self, params: Params) -> Params:
        state = self.upload.init(params)
        if self.residual is None or not state:
            return state
        given = {name: value.to(state[name]) for name, value in self.residual.items() if name in state}
        missing = {name: value for name, value in state.items() if not name.startswith(INNER)}
        if wrong := misfit(missing, {name: value for name, value in given.items() if name in missing}):
            raise WrongInput("residual", f"does not fit the gradient; {wrong}")
        return state | given


def guard_of(
    defense: Defense,
    residual: Params | Path | str | None,
    seed: int,
    other: Callable[[int], Batch] | None = None,
) -> Guard | None:
    """The guard that a defense asks for; a residual goes to those with error feedback, another user's batch to adgp."""
    for part in defense.parts:
        if part.name != "none" and part.method.info["acts_on"] not in UPDATES:
            raise WrongInput("defense", f"{part.name} acts on {part.method.info['acts_on']}, not on what is sent")
    upload = upload_of(defense)
    if upload is None:
        return None
    wanted = residual if defense.acting_on("residual") else None
    return Guard(upload, _read(wanted) if isinstance(wanted, Path | str) else wanted, seed, other)


def protected(net: nn.Module, defense: Defense, classes: int, rng: Generator) -> tuple[nn.Module, Precode | None]:
    """The network with what a defense puts into it, and that defense; a network that has it already stays."""
    part = defense.acting_on("model")
    made: Precode | None = None if part is None else part.make()
    if made is None or bottleneck_of(net) is not None:
        return net, made
    return with_bottleneck(net, classes, rng, made.size), made


def transform_of(defense: Defense, mean: Tensor, std: Tensor) -> Transform | None:
    """What a defense does to the client's examples, where it does anything."""
    part = defense.acting_on("inputs")
    return None if part is None else part.make().transform(mean, std)


def guarantee_of(defense: Defense) -> Guarantee | None:
    """What a defense proves of one update whose examples were not sampled."""
    part = defense.acting_on("upload")
    made: Any = None if part is None else part.make()
    found: Guarantee | None = made.guarantee() if hasattr(made, "guarantee") else None
    return found


def remarked(rows: Iterable[Row], defense: Defense, attacks: Sequence[Choice], trained: bool = False) -> list[Row]:
    """The rows of one attack with what their reader must know: what is proved, and that no attacker knew of it.

    `trained` says that error feedback had the residual of a training, not an empty one.
    """
    empty = defense.acting_on("residual") is not None and not trained
    first = "its residual is empty, as in the first round; later ones send something else" if empty else None
    own = [f"{defense}: {told}" for told in (guarantee_of(defense), first) if told]
    said = [*own, caution(defense, attacks)]

    def noted(row: Row) -> Row:
        return replace(row, note="; ".join(filter(None, (row.note, *said))) or None)

    return [noted(row) if row.metric == "psnr" else row for row in rows]


def caution(defense: Defense, attacks: Sequence[Choice]) -> str | None:
    """What to say where no attack was of the kind that the defense is known to be weak against."""
    known = {getattr(attack.make(), "adaptive", "none") for attack in attacks}
    missed = [names for part in defense.parts if not known & {*(names := part.method.info.get("adaptive", ()))}]
    weak = sorted({name for names in missed for name in names})
    if not weak:
        return None
    how = "was attacked plainly only" if known <= {"none"} else "was not attacked as its weakness asks for"
    return f"{defense} {how}; an attacker who knows of it (adaptive: {' or '.join(weak)}) may see more"


def _read(path: Path | str) -> Params:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise WrongInput("residual", f"{path} cannot be read as a .safetensors file: {error}") from error
