"""The client under attack: the model that it received, the update that it sends, and its attacker's knowledge.

`UploadDefense` applies a defense to the update. `add_cautions` adds to the rows the cautions that a defense calls for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur.attacks.inversion.adaptive import PLAIN, Adaptive, mode_of_attack
from secateur.attacks.inversion.updates import gradient_update, statistics_of, weights_update
from secateur.catalogue import Choice, Defense
from secateur.config import UPDATES
from secateur.data.dataset import Dataset
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.error_feedback import INNER, ErrorFeedback, upload_of
from secateur.defenses.precode import Precode, bottleneck_of, with_bottleneck, with_divergence, with_noise
from secateur.errors import WrongInput
from secateur.functional import noise_of
from secateur.interfaces import (
    Batch,
    Gradient,
    InversionAttack,
    Knowledge,
    Mask,
    Params,
    ServerView,
    Transform,
    Upload,
    UploadContext,
    Weights,
)
from secateur.models.create import misfit, read_tensors, shorten_list
from secateur.runs.rows import Row, join_notes
from secateur.seeding import derive
from secateur.tree import list_trained

GUESSES: Mapping[Adaptive, str] = {
    "support": "that an entry of zero was dropped",
    "layer": "that one layer is not to be trusted",
    "reapply": "that the update was compressed, but not how",
    "mask": "that small entries are noise where something was dropped",
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of an update
KINDS: dict[str, type[Gradient] | type[Weights]] = {"gradient": Gradient, "weights": Weights}
Target = Batch | Gradient | Weights  # examples that the client makes an update of, or a captured update


@dataclass(frozen=True, eq=False)
class AttackedClient:
    """A client whose settings are the same for all its updates."""

    net: nn.Module
    state: Params  # the model that an honest server sends: parameters and buffers
    knowledge: Knowledge  # without the fields that differ by target
    sends_weights: bool = False
    tells_labels: bool = False
    tells_statistics: bool = False
    guard: UploadDefense | None = None  # rewrites the gradient before it is sent
    transform: Transform | None = None  # of the examples before they are used
    precode: Precode | None = None  # the settings of the network's bottleneck
    seed: int = 0  # of the random numbers of transform and noise
    adaptive: Adaptive = "none"  # how the attacker adapts

    def meet_attack(self, attack: InversionAttack) -> AttackedClient:
        """Return the client as this attack meets it: an attacker who reapplies the compression knows it."""
        adaptive: Adaptive = getattr(attack, "adaptive", "none")
        compression = self.guard.compression if self.guard is not None and adaptive == "reapply" else None
        return replace(self, knowledge=replace(self.knowledge, compression=compression), adaptive=adaptive)

    def show_targets(
        self, attack: InversionAttack, targets: Sequence[Target], rng: Generator, first: int = 0
    ) -> tuple[Knowledge, list[list[ServerView]]]:
        """Return the attacker's knowledge and its views of every target: one round, after it tampered with the model.

        `first` is the number of the first target among all targets; a defense derives its generator from that number.
        """
        net, sent = attack.tamper(self.net, self.state, self.knowledge, rng)
        used = [self.transform_target(target, number) for number, target in enumerate(targets, first)]
        updates = [self._update(net, sent, target, number) for number, target in enumerate(used, first)]
        batches = [(number, target) for number, target in enumerate(used, first) if isinstance(target, Batch)]
        labels = torch.stack([batch.labels for _, batch in batches]) if self.tells_labels else None
        statistics = None
        if self.tells_statistics:
            how = self.knowledge.batchnorm
            statistics = [statistics_of(net, self._draw_state(net, sent, batch, i), batch, how) for i, batch in batches]
        knowledge = self.meet_attack(attack).knowledge
        known = replace(knowledge, net=self._imagine_network(net, attack), labels=labels, statistics=statistics)
        return known, [[ServerView(sent, update)] for update in updates]

    def transform_target(self, target: Target, number: int) -> Target:
        """Return the examples that the update is made of: transformed where a defense does that."""
        if self.transform is None or not isinstance(target, Batch):
            return target
        return target._replace(inputs=self.transform(target.inputs, derive(self.seed, "transform", number)))

    def _update(self, net: nn.Module, sent: Params, target: Target, number: int) -> Gradient | Weights:
        if not isinstance(target, Batch):
            return target
        known, held = self.knowledge, self._draw_state(net, sent, target, number)
        if self.precode is not None and self.precode.divergence:
            net, loss = with_divergence(net, known.loss, self.precode.beta)
            known = replace(known, loss=loss)
        if not self.sends_weights:
            plain = gradient_update(net, held, target, known.batchnorm, known.loss)
            return plain if self.guard is None else self.guard(plain, held, target, number, replace(known, net=net))
        if known.learning_rate is None:
            raise WrongInput("learning_rate", "must be given for a client that sends its weights")
        steps, learning_rate, batch_size = known.local_steps, known.learning_rate, known.local_batch
        return weights_update(net, held, target, known.batchnorm, steps, learning_rate, batch_size, known.loss)

    def _draw_state(self, net: nn.Module, sent: Params, batch: Batch, number: int) -> Params:
        """Return the state that was sent, with the noise that the client draws for noisy modules."""
        return sent | noise_of(net, batch.size, derive(self.seed, "noise", number))

    def _imagine_network(self, net: nn.Module, attack: InversionAttack) -> nn.Module:
        """Return the network as the attacker runs it: with a noise sample of its own, or with the mean."""
        if self.precode is None or getattr(attack, "adaptive", "none") != "none":
            return net
        return with_noise(net, noise_of(net, self.knowledge.batch_size, derive(self.seed, "noise", "attacker")))

    @property
    def sends(self) -> str:
        """The kind of update in words."""
        if not self.sends_weights:
            return "gradient"
        steps = self.knowledge.local_steps
        return f"weights after {steps} local step{'s' if steps > 1 else ''}"

    @property
    def knows(self) -> str:
        """The attacker's knowledge beside the model and the update, in words."""
        size = self.knowledge.batch_size
        facts = ["one example an update" if size == 1 else f"{size} examples an update", "how pixels become inputs"]
        facts += ["the labels"] if self.tells_labels else []
        facts += ["the batch's BatchNorm statistics"] if self.tells_statistics else []
        facts += ["the client's steps and learning rate"] if self.sends_weights else []
        facts += ["a generator of such pictures"] if self.knowledge.generator is not None else []
        if self.adaptive != "none":
            facts += ["the client's compression" if self.knowledge.compression is not None else GUESSES[self.adaptive]]
        return ", ".join(facts)


@dataclass(frozen=True, eq=False)
class UploadDefense:
    """The defense of an attacked client's upload."""

    upload: Upload
    residual: Params | None = None  # after a training with error feedback; None: before the first round
    seed: int = 0
    other: Callable[[int], Batch] | None = None  # adgp: the batch of the user that broadcasts beside target i

    def __call__(self, gradient: Gradient, sent: Params, batch: Batch, number: int, knowledge: Knowledge) -> Gradient:
        """Return the upload of one target; every attack on that target sees the same one."""
        rng = derive(self.seed, "upload", number)
        turning = UploadContext(knowledge.net, sent, batch, 0, rng, knowledge.loss, knowledge.batchnorm)
        outside = self._draw_inside(sent, number, knowledge)
        values, _ = self.upload(gradient.values, self._state(gradient.values), turning, **outside)
        return Gradient(values)

    def _draw_inside(self, sent: Params, number: int, knowledge: Knowledge) -> dict[str, Mask]:
        """Return I of the broadcasting user, which adgp's client receives where it does not broadcast itself.

        I comes from that user's plain gradient, before its first residual.
        """
        if not isinstance(self._inner, AlignedDualGradientPruning) or self._inner.chosen:
            return {}
        if self.other is None:
            raise WrongInput("defense", "adgp:chosen=false follows another user; use at least two updates")
        gradient = gradient_update(knowledge.net, sent, self.other(number), knowledge.batchnorm, knowledge.loss)
        return {"inside": self._inner.positions(gradient.values)}

    @property
    def _inner(self) -> Upload:
        return self.upload.inner if isinstance(self.upload, ErrorFeedback) else self.upload

    @property
    def compression(self) -> Callable[[Params], Params] | None:
        """The compression that an attacker can apply to a trial's gradient; None if it depends on other values."""
        compress: Callable[[Params], Params] | None = getattr(self._inner, "compress", None)
        return compress if getattr(self._inner, "chosen", True) else None

    def _state(self, params: Params) -> Params:
        """Return the upload's state before this update: new, or with the residual of a training."""
        state = self.upload.init(params)
        if self.residual is None or not state:
            return state
        residual = {name: value.to(state[name]) for name, value in self.residual.items() if name in state}
        expected = {name: value for name, value in state.items() if not name.startswith(INNER)}
        if wrong := misfit(expected, {name: value for name, value in residual.items() if name in expected}):
            raise WrongInput("residual", f"does not fit the gradient; {wrong}")
        return state | residual


def guard_of(
    defense: Defense,
    residual: Params | Path | str | None,
    seed: int,
    other: Callable[[int], Batch] | None = None,
) -> UploadDefense | None:
    """Return the guard of a defense; error feedback uses the residual, adgp another user's batch."""
    for part in defense.parts:
        if part.name != "none" and part.method.info["acts_on"] not in UPDATES:
            raise WrongInput("defense", f"{part.name} acts on {part.method.info['acts_on']}, not on what is sent")
    upload = upload_of(defense)
    if upload is None:
        return None
    start = residual if defense.find_part("residual") else None
    values = read_tensors("residual", start)[0] if isinstance(start, Path | str) else start
    return UploadDefense(upload, values, seed, other)


def protect(net: nn.Module, defense: Defense, classes: int, rng: Generator) -> tuple[nn.Module, Precode | None]:
    """Return the network with the module that a defense inserts, and that defense; a network that has one stays."""
    part = defense.find_part("model")
    precode: Precode | None = None if part is None else part.make()
    if precode is None or bottleneck_of(net) is not None:
        return net, precode
    return with_bottleneck(net, classes, rng, precode.size), precode


def transform_of(defense: Defense, mean: Tensor, std: Tensor) -> Transform | None:
    """Return the transform that a defense applies to the client's examples; None if there is none."""
    part = defense.find_part("inputs")
    return None if part is None else part.make().transform(mean, std)


def guarantee_of(defense: Defense) -> Guarantee | None:
    """Return the privacy guarantee of a defense for one update whose examples were not sampled."""
    part = defense.find_part("upload")
    method: Any = None if part is None else part.make()
    guarantee: Guarantee | None = method.guarantee() if hasattr(method, "guarantee") else None
    return guarantee


def add_cautions(
    rows: Iterable[Row],
    defense: Defense,
    attacks: Sequence[Choice],
    trained: bool = False,
    calibration: str | None = None,
) -> list[Row]:
    """Return the rows of one attack with notes: the guarantee, and a caution if no attacker knew of the defense.

    Args:
        rows: the rows of the attack.
        defense: the defense that it met.
        attacks: all attacks on this defense.
        trained: True if error feedback started from the residual of a training, not from an empty one.
        calibration: how the attacker chose its settings.
    """
    empty = defense.find_part("residual") is not None and not trained
    residual = "its residual is empty, as in the first round; later ones send something else" if empty else None
    facts = [f"{defense}: {fact}" for fact in (guarantee_of(defense), residual) if fact]
    notes = [calibration, *facts, caution(defense, attacks)]
    return [replace(row, note=join_notes(row.note, *notes)) if row.metric == "psnr" else row for row in rows]


def caution(defense: Defense, attacks: Sequence[Choice]) -> str | None:
    """Return a caution if no attack was of the kind that the defense is known to be weak against."""
    mounted = [attack.make() for attack in attacks]
    known = set(map(mode_of_attack, mounted))
    missed = [names for part in defense.parts if not known & {*(names := part.method.info.get("adaptive", ()))}]
    weak = sorted({name for names in missed for name in names})
    if not weak:
        return None
    how = "was attacked plainly only" if known <= {PLAIN} else "was not attacked as its weakness asks for"
    return f"{defense} {how}; an attacker who knows of it (adaptive: {' or '.join(weak)}) may see more"


def check_attack(attack: Choice, client: AttackedClient, target: Target, rng: Generator) -> None:
    """Refuse, before any work, an attack that cannot be mounted on this client."""
    attacker: InversionAttack = attack.make()
    if not isinstance(target, Batch) and attack.method.info.get("active"):
        needs = "changes the model before it is sent, and this update was captured before"
        raise WrongInput("attack", f"{attack.name} {needs}; choose a passive attack")
    knowledge, views = client.show_targets(attacker, [target], rng)
    attacker.check(knowledge, views[0][0])


def check_pictures(data: Dataset) -> None:
    """Refuse data whose examples are not pictures."""
    check_shape("data", data.name, data.input_shape)


def check_shape(field: str, name: str, shape: Sequence[int]) -> None:
    """Refuse examples that are not grey or colour pictures."""
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape) < 1:
        wanted = "it must have pictures: (1 or 3 channels, height, width)"
        raise WrongInput(field, f"{name} has examples of the shape {tuple(shape)}; {wanted}")


def scale(mean: Sequence[float], std: Sequence[float], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (C, 1, 1) mean and deviation of pixels; if none are known, the inputs must be pixels in [0, 1]."""
    channels = inputs.shape[1]
    if not mean and not std:
        low, high = float(inputs.min()), float(inputs.max())
        if low < 0 or high > 1:
            advice = "use pixels in [0, 1], or set mean and std"
            raise WrongInput("data", f"inputs lie in [{low:.3g}, {high:.3g}]; {advice}")
        mean, std = [0.0] * channels, [1.0] * channels
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise WrongInput("mean", f"must be one mean and one std above 0 for each of the {channels} channels")
    return _shape_channels(mean, inputs), _shape_channels(std, inputs)


def _shape_channels(values: Sequence[float], inputs: Tensor) -> Tensor:
    """Return the values of the channels as a (C, 1, 1) tensor."""
    return torch.tensor(list(values), dtype=inputs.dtype, device=inputs.device).view(-1, 1, 1)


def read_update(path: Path, net: nn.Module, weights: bool) -> Gradient | Weights:
    """Read the update of a file, in the precision of the model's parameters; refuse one that does not fit the model.

    The file's metadata may hold `kind`: gradient or weights. Otherwise `weights` is True for weights.
    """
    values, metadata = read_tensors("update", path)
    stated_kind = metadata.get("kind")
    kind = stated_kind or ("weights" if weights else "gradient")
    if kind not in KINDS:
        raise WrongInput("update", f"{path} says that its kind is {kind!r}; allowed: {', '.join(KINDS)}")
    buffers = {name for name, _ in net.named_buffers()}
    held = {name: value for name, value in values.items() if kind == "gradient" or name not in buffers}
    tensors = fit_update(held, net, str(path))
    if kind == "gradient" and not any(bool(value.any()) for value in tensors.values()):
        raise WrongInput("update", f"{path} is zero everywhere, so it reveals nothing; use another")
    if stated_kind is None and kind == "gradient" and _is_near_model(tensors, net):
        advice = "use --local-steps and --learning-rate, or write kind=gradient into the file's metadata"
        raise WrongInput("update", f"{path} looks like weights, for it is nearly the model that was sent; {advice}")
    return KINDS[kind](tensors)


def _is_near_model(values: Params, net: nn.Module) -> bool:
    """Return True if the update differs from the model by less than half its norm: weights do, gradients do not."""
    parameters = dict(net.named_parameters())
    gap = sum(float((value - parameters[name].detach()).double().square().sum()) for name, value in values.items())
    return gap < sum(float(value.double().square().sum()) for value in values.values()) / 4


def fit_update(values: Params, net: nn.Module, name: str) -> Params:
    """Return an update's tensors in the order, precision and device of the model's parameters; refuse a misfit.

    Tensors of frozen parameters are dropped, as these were not trained.
    """
    every = dict(net.named_parameters())
    wanted = {key: every[key] for key in list_trained(net)}
    values = {key: value for key, value in values.items() if key in wanted or key not in every}
    if wrong := misfit(wanted, values):
        raise WrongInput("update", f"{name} does not fit the model; {wrong}")
    if strange := [f"{key} ({value.dtype})" for key, value in values.items() if value.dtype not in FLOATS]:
        raise WrongInput("update", f"{name} holds other numbers in {shorten_list(strange)}; save it as float32")
    broken = [key for key, value in values.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise WrongInput(
            "update", f"{name} holds NaN or infinity in {shorten_list(broken)}; every number must be finite"
        )
    return {key: values[key].to(value) for key, value in wanted.items()}
