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

from secateur.attacks.inversion.adaptive import FILL, PLAIN, AdaptiveServer, mode_of_attack, support
from secateur.attacks.inversion.updates import gradient_update, statistics_of, weights_update
from secateur.catalogue import Choice, Defense
from secateur.config import TRAINED, UPDATES
from secateur.data.dataset import Dataset
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.error_feedback import INNER, RESIDUAL, ErrorFeedback, upload_of
from secateur.defenses.precode import Precode, bottleneck_of, with_bottleneck, with_divergence, with_noise
from secateur.errors import WrongInput
from secateur.functional import noise_of
from secateur.interfaces import (
    PLAIN_SGD,
    Batch,
    Gradient,
    InversionAttack,
    Knowledge,
    Loss,
    Mask,
    Params,
    ServerView,
    Transform,
    Upload,
    UploadContext,
    Weights,
)
from secateur.models.create import misfit, read_tensors
from secateur.runs.rows import Row, join_notes
from secateur.seeding import derive
from secateur.training.optimisers import read_steps, shuffle_epochs, write_optimiser

GUESSES: Mapping[AdaptiveServer, str] = {
    "support": "that an entry of zero was dropped",
    "layer": "that one layer is not to be trusted",
    "reapply": "that the update was compressed, but not how",
    "mask": "that small entries are noise where something was dropped",
    "loss": "the client's loss",
    FILL: "that an entry of zero was withheld",
}
NAIVE = "but takes its steps as one of plain gradient descent"
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
    adaptive: AdaptiveServer = "none"  # how the attacker adapts
    loss: Loss | None = None  # of the client where a defense changes it; an attacker knows it by adaptive=loss alone
    repeats: int = 1  # rounds in a row that are of one target's examples; the last of them is attacked
    further: Sequence[ServerView] = ()  # captured rounds of the same examples beside the attacked one
    remembered: tuple[str, ...] = ()  # the attacker's use of earlier rounds, in words
    estimate: str | None = None  # the attacker's of the optimiser, if it does not know it

    def meet_attack(self, attack: InversionAttack) -> AttackedClient:
        """Return the client as this attack meets it: an attacker who reapplies the compression knows it."""
        adaptive: AdaptiveServer = getattr(attack, "adaptive", "none")
        compression = self.guard.compression if self.guard is not None and adaptive == "reapply" else None
        rounds, remembered = getattr(attack, "rounds", 1), []
        if getattr(attack, "follows", False) and self.guard is not None and self.guard.feeds_back:
            remembered = ["which entries the client sent last"] if self.guard.sent or self.repeats > 1 else []
        remembered += [f"that its last {rounds} rounds are of the same examples"] if rounds > 1 else []
        known = self.truthful if adaptive == "loss" else self.knowledge
        if self.sends_weights and not getattr(attack, "unrolls", True):
            known, remembered = replace(known, optimiser=PLAIN_SGD, local_epochs=None), [*remembered, NAIVE]
        known = replace(known, compression=compression)
        return replace(self, knowledge=known, adaptive=adaptive, remembered=tuple(remembered))

    def show_targets(
        self, attack: InversionAttack, targets: Sequence[Target], rng: Generator, first: int = 0
    ) -> tuple[Knowledge, list[list[ServerView]]]:
        """Return the attacker's knowledge and its views of every target, after it tampered with the model.

        The views of a target are those of as many rounds as the attack joins, the latest first. `first` is the number
        of the first target among all targets; a defense derives its generator from that number.
        """
        net, sent = attack.tamper(self.net, self.state, self.knowledge, rng)
        used = [self.transform_target(target, number) for number, target in enumerate(targets, first)]
        rounds = [self._run_rounds(net, sent, target, number) for number, target in enumerate(used, first)]
        batches = [(number, target) for number, target in enumerate(used, first) if isinstance(target, Batch)]
        labels = torch.stack([batch.labels for _, batch in batches]) if self.tells_labels else None
        statistics = None
        if self.tells_statistics:
            how = self.knowledge.batchnorm
            statistics = [statistics_of(net, self._draw_state(net, sent, batch, i), batch, how) for i, batch in batches]
        knowledge = self.meet_attack(attack).knowledge
        known = replace(knowledge, net=self._imagine_network(net, attack), labels=labels, statistics=statistics)
        return known, [self._select_views(attack, views) for views in rounds]

    def _run_rounds(self, net: nn.Module, sent: Params, target: Target, number: int) -> list[ServerView]:
        """Return the rounds that are of one target's examples, the latest first.

        Between two rounds the server takes a step with the client's update alone.
        """
        if not isinstance(target, Batch):
            return [ServerView(sent, target), *self.further]
        views: list[ServerView] = []
        memory: Params | None = None
        for turn in range(self.repeats):
            update, memory = self._update(net, sent, target, number, turn, memory)
            views.insert(0, ServerView(sent, update))
            if isinstance(update, Weights):
                sent = sent | update.values
            else:
                rate = self.knowledge.learning_rate or 0.0
                sent = sent | {name: sent[name] - rate * value for name, value in update.values.items()}
        return views

    def _select_views(self, attack: InversionAttack, views: Sequence[ServerView]) -> list[ServerView]:
        """Return the rounds that an attack joins; with error feedback each says which entries were sent before it."""
        rounds = getattr(attack, "rounds", 1)
        if rounds > len(views):
            other = "the client makes every update of other examples, so there is nothing to join"
            few = other if len(views) == 1 else f"only the last {len(views)} are of the same examples"
            raise WrongInput("rounds", f"{rounds} cannot be joined: {few}; use --repeats {rounds} for such a client")
        if self.guard is None or not self.guard.feeds_back:
            return list(views[:rounds])
        earlier = [*(support(view.update.values) for view in views[1:]), self.guard.sent]
        return [replace(view, last=mask) for view, mask in zip(views[:rounds], earlier, strict=False)]

    def transform_target(self, target: Target, number: int) -> Target:
        """Return the examples that the update is made of: transformed where a defense does that."""
        if self.transform is None or not isinstance(target, Batch):
            return target
        return target._replace(inputs=self.transform(target.inputs, derive(self.seed, "transform", number)))

    def _update(
        self, net: nn.Module, sent: Params, target: Batch, number: int, turn: int, memory: Params | None
    ) -> tuple[Gradient | Weights, Params | None]:
        """Return a target's update of one round, and the state that its upload keeps for the next one."""
        known, held = self.truthful, self._draw_state(net, sent, target, number, turn)
        if self.precode is not None and self.precode.divergence:
            net, loss = with_divergence(net, known.loss, self.precode.beta)
            known = replace(known, loss=loss)
        if not self.sends_weights:
            plain = gradient_update(net, held, target, known.batchnorm, known.loss)
            if self.guard is None:
                return plain, None
            return self.guard(plain, held, target, number, replace(known, net=net), turn, memory)
        if known.learning_rate is None and isinstance(known.optimiser.schedule, str):
            raise WrongInput("learning_rate", "must be given for a client that sends its weights")
        order = derive(self.seed, "epochs", number, *name_turn(turn))
        local = shuffle_epochs(read_steps(known), known.local_epochs or 1, order)
        return weights_update(net, held, target, known.batchnorm, loss=known.loss, turn=local), None

    def _draw_state(self, net: nn.Module, sent: Params, batch: Batch, number: int, turn: int = 0) -> Params:
        """Return the state that was sent, with the noise that the client draws for noisy modules."""
        return sent | noise_of(net, batch.size, derive(self.seed, "noise", number, *name_turn(turn)))

    def measure_residual(self, targets: Sequence[Target]) -> list[float]:
        """Return, for each target, the norm of the residual before it divided by that of its gradient."""
        guard, known, ratios = self.guard, self.truthful, []
        if guard is None or not guard.feeds_back or guard.residual is None:
            return []
        for number, target in enumerate(targets):
            used = self.transform_target(target, number)
            assert isinstance(used, Batch), "a captured update has no residual"
            held = self._draw_state(self.net, self.state, used, number)
            gradient = gradient_update(self.net, held, used, known.batchnorm, known.loss).values
            state = guard.start(gradient)
            ratios.append(norm_of(state[RESIDUAL + name] for name in gradient) / norm_of(gradient.values()))
        return ratios

    def _imagine_network(self, net: nn.Module, attack: InversionAttack) -> nn.Module:
        """Return the network as the attacker runs it: with a noise sample of its own, or with the mean."""
        if self.precode is None or getattr(attack, "adaptive", "none") != "none":
            return net
        return with_noise(net, noise_of(net, self.knowledge.batch_size, derive(self.seed, "noise", "attacker")))

    @property
    def truthful(self) -> Knowledge:
        """The knowledge of the client itself, which has its own loss."""
        return self.knowledge if self.loss is None else replace(self.knowledge, loss=self.loss)

    @property
    def sends(self) -> str:
        """The kind of update in words."""
        if not self.sends_weights:
            return "gradient"
        return describe_weights(self.knowledge)

    @property
    def knows(self) -> str:
        """The attacker's knowledge beside the model and the update, in words."""
        size = self.knowledge.batch_size
        facts = ["one example an update" if size == 1 else f"{size} examples an update", "how pixels become inputs"]
        facts += ["the labels"] if self.tells_labels else []
        facts += ["the batch's BatchNorm statistics"] if self.tells_statistics else []
        if self.sends_weights:
            rule = describe_local(self.knowledge)
            rule = ["the client's steps and learning rate", *rule] if self.estimate is None else ["the client's steps"]
            facts += rule + ([] if self.estimate is None else [f"an estimate of its optimiser ({self.estimate})"])
        facts += ["a generator of such pictures"] if self.knowledge.generator is not None else []
        if self.adaptive != "none":
            facts += ["the client's compression" if self.knowledge.compression is not None else GUESSES[self.adaptive]]
        return ", ".join([*facts, *self.remembered])


def describe_weights(knowledge: Knowledge) -> str:
    """Return the update of a client that sends weights, in words.

    Example:
        >>> from secateur.interfaces import Optimiser
        >>> net, scale = nn.Identity(), torch.ones(1, 1, 1)
        >>> known = Knowledge(net, (1, 2, 2), 2, scale, scale, 12, local_epochs=2, local_batch=5)
        >>> describe_weights(known), describe_weights(replace(known, local_epochs=None, optimiser=Optimiser("adam")))
        ('weights after 2 local epochs of 3 steps', 'weights after 1 local step of adam')
    """
    rule = "" if knowledge.optimiser.is_plain else f" of {write_optimiser(knowledge.optimiser)}"
    if knowledge.local_epochs is None:
        steps = knowledge.local_steps
        return f"weights after {steps} local step{'s' if steps > 1 else ''}{rule}"
    steps, epochs = -(-knowledge.batch_size // (knowledge.local_batch or knowledge.batch_size)), knowledge.local_epochs
    many = f"{epochs} local epoch{'s' if epochs > 1 else ''} of {steps} step{'s' if steps > 1 else ''}"
    return f"weights after {many}{rule}"


def describe_local(knowledge: Knowledge) -> list[str]:
    """Return the attacker's knowledge of the local training beside its steps and learning rate, as phrases."""
    phrases = [] if knowledge.optimiser.is_plain else [f"its optimiser ({write_optimiser(knowledge.optimiser)})"]
    return phrases + ([] if knowledge.local_epochs is None else ["not the order of its examples"])


@dataclass(frozen=True, eq=False)
class UserMemory:
    """The memory of a user in mid-training: the state of its upload, and the entries that it sent last."""

    state: Params
    sent: Mask


@dataclass(frozen=True, eq=False)
class UploadDefense:
    """The defense of an attacked client's upload."""

    upload: Upload
    residual: Params | None = None  # after a training with error feedback; None: before the first round
    seed: int = 0
    other: Callable[[int], Batch] | None = None  # adgp: the batch of the user that broadcasts beside target i
    sent: Mask | None = None  # the entries of the client's last update that were not 0, which the server saw
    round: int = 0  # rounds before the attacked one
    colleague: UserMemory | None = None  # another user of that training: adgp's broadcaster, or one of the attacker's

    def __call__(
        self,
        gradient: Gradient,
        sent: Params,
        batch: Batch,
        number: int,
        knowledge: Knowledge,
        turn: int = 0,
        memory: Params | None = None,
    ) -> tuple[Gradient, Params]:
        """Return the upload of one target in one of its rounds, and the state after it.

        Every attack on that target sees the same upload. `memory` is the state after the target's last round.
        """
        rng = derive(self.seed, "upload", number, *name_turn(turn))
        number_of_round = self.round + turn
        turning = UploadContext(knowledge.net, sent, batch, number_of_round, rng, knowledge.loss, knowledge.batchnorm)
        outside = self._draw_inside(sent, number, knowledge)
        state = self.start(gradient.values) if memory is None else memory
        values, after = self.upload(gradient.values, state, turning, **outside)
        return Gradient(values), after

    @property
    def feeds_back(self) -> bool:
        """True if entries that are not sent are added to a later update."""
        return isinstance(self.upload, ErrorFeedback)

    def imitate(self, seed: int, other: Callable[[int], Batch]) -> UploadDefense:
        """Return the defense as an attacker runs it on its own examples.

        The residual of the client stays at the client. The attacker has that of a user of its own in the training.
        """
        mine, user = replace(self, seed=seed, other=other), self.colleague
        return mine if user is None else replace(mine, residual=user.state, sent=user.sent)

    def _draw_inside(self, sent: Params, number: int, knowledge: Knowledge) -> dict[str, Mask]:
        """Return I of the broadcasting user, which adgp's client receives where it does not broadcast itself.

        I comes from that user's gradient, with its residual if it has one.
        """
        if not isinstance(self._inner, AlignedDualGradientPruning) or self._inner.chosen:
            return {}
        if self.other is None:
            raise WrongInput("defense", "adgp:chosen=false follows another user; use at least two updates")
        gradient = gradient_update(knowledge.net, sent, self.other(number), knowledge.batchnorm, knowledge.loss).values
        if isinstance(self.upload, ErrorFeedback) and self.colleague is not None:
            gradient = self.upload.accumulate(gradient, self.colleague.state)
        return {"inside": self._inner.positions(gradient)}

    @property
    def _inner(self) -> Upload:
        return self.upload.inner if isinstance(self.upload, ErrorFeedback) else self.upload

    @property
    def compression(self) -> Callable[[Params], Params] | None:
        """The compression that an attacker can apply to a trial's gradient; None if it depends on other values."""
        compress: Callable[[Params], Params] | None = getattr(self._inner, "compress", None)
        return compress if getattr(self._inner, "chosen", True) else None

    def start(self, params: Params) -> Params:
        """Return the upload's state before this update: new, or with the residual of a training."""
        state = self.upload.init(params)
        if self.residual is None or not state:
            return state
        residual = {name: value.to(state[name]) for name, value in self.residual.items() if name in state}
        expected = {name: value for name, value in state.items() if not name.startswith(INNER)}
        if wrong := misfit(expected, {name: value for name, value in residual.items() if name in expected}):
            raise WrongInput("residual", f"does not fit the gradient; {wrong}")
        return state | residual


def name_turn(turn: int) -> tuple[int, ...]:
    """Return the names of a turn among all draws of a target; the first turn has none."""
    return (turn,) if turn else ()


def norm_of(values: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors."""
    return float(torch.cat([value.flatten().double() for value in values]).norm())


def guard_of(
    defense: Defense,
    residual: Params | Path | str | None,
    seed: int,
    other: Callable[[int], Batch] | None = None,
) -> UploadDefense | None:
    """Return the guard of a defense; error feedback uses the residual, adgp another user's batch."""
    for part in defense.parts:
        if part.name != "none" and part.method.info["acts_on"] not in (*UPDATES, TRAINED):
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


def loss_of(defense: Defense, batch_size: int) -> Loss | None:
    """Return the loss of a client whose defense changes it; refuse a loss of pairs for updates of one example."""
    part = defense.find_part(TRAINED)
    if part is not None and batch_size < 2:
        alone = f"{part.name} balances pairs of examples, and an update of one has none"
        raise WrongInput("batch_size", f"{alone}: it would be the plain one; use 2 or more")
    return None if part is None else part.make()


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
    fills = any(FILL in attack.method.info.get("adapts", ()) for attack in attacks)
    modes = [[*part.method.info.get("adaptive", ())] for part in defense.parts]
    kinds = [[name for name in names if name != FILL] for names in modes]
    kinds += [[FILL]] * (fills and any(FILL in names for names in modes))  # a tampering server's own way
    weak = sorted({name for names in kinds if not known & {*names} for name in names})
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
