"""An auditor of updates as a server sees them: it attacks single updates or sums, and writes rows and a page.

It knows no framework. Strategies of Flower and filters of NVIDIA FLARE hand it what leaves a client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from secateur.attacks.inversion.updates import weights_update
from secateur.catalogue import Choice, methods, name_of
from secateur.config import inversion
from secateur.config.methods import defense as read_defense
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.effect import IDLE, cosine, find_contradiction
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.evaluation import gallery
from secateur.evaluation.calibration import is_open, list_weights
from secateur.evaluation.client import caution
from secateur.evaluation.membership import flat_labels
from secateur.evaluation.reconstruction import (
    COSINE,
    Scoring,
    attack_labels,
    judge,
    summary_rows,
    target_rows,
    with_extras,
)
from secateur.interfaces import Batch, InversionAttack, Knowledge, Params, ServerView, Weights
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.folder import open_run
from secateur.runs.rows import Row, join_notes
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive
from secateur.training.optimisers import read_steps


class Auditor:
    """An attacker with a server's knowledge, which keeps the page in `out` up to date.

    `knowledge` must have the local steps and the learning rate of the clients. Where the examples of an update are
    known, reconstructions are scored against them; else the page shows the reconstructions unscored. An attack such as
    ig runs with several weights of total variation, each under its own name, unless its `tv` is set. The page says if
    the defense changed nothing: by the known examples, or by the client's statement. It says if an update is visibly
    not the defense's.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        attacks: str | Sequence[str],
        out: Path | str,
        *,
        defense: str = "none",
        name: str = "model",
        images: bool = True,
        seed: int = 0,
        **over: Any,
    ) -> None:
        if knowledge.learning_rate is None:
            raise WrongInput("knowledge", "must have the clients' learning_rate and local_steps: they send weights")
        chosen = [inversion(name, **over) for name in ([attacks] if isinstance(attacks, str) else attacks)]
        self.attacks = [x for attack in chosen for x in (list_weights(attack) if is_open(attack) else [attack])]
        self.knowledge, self.images, self.out = knowledge, images, Path(out)
        extra = {"labels": "inferred", "update": f"weights after {knowledge.local_steps} local steps"}
        self.labels: dict[str, Any] = {"model": name, "dataset": "given", "seed": seed, "defense": defense}
        self.labels |= {"extra": extra}
        self.rows: list[Row] = []
        self.figures: list[dict[str, Any]] = []
        self.targets = 0  # attacked updates
        self.scoring = Scoring(load_weights())
        known = all(name_of(part) in methods("defense") for part in defense.split("+"))  # or a name of the user's own
        self.caution = caution(read_defense(defense), self.attacks) if known else None
        self.upload = upload_of(read_defense(defense)) if known else None

    def __call__(
        self,
        number: int,
        node: int | None,
        sent: Params,
        weights: Params,
        truth: Batch | None = None,
        clients: int | None = None,
        stated: float | None = None,
    ) -> None:
        """Attack one update of a round, or where `clients` is set the average of so many, as one batch of theirs.

        `stated` is the cosine of the update before and after its defense, as its client states it.
        """
        names = [name for name, _ in self.knowledge.net.named_parameters()]
        if missing := [name for name in names if name not in weights]:
            raise WrongInput("knowledge", f"its net has {missing[0]}, and the update does not; use the app's net")
        view = ServerView(sent, Weights({name: weights[name] for name in names}))
        size = self.knowledge.batch_size * (clients or 1) if truth is None else truth.size
        local = self.knowledge.local_batch
        known = replace(self.knowledge, batch_size=size, local_batch=local and local * (clients or 1))
        labels = self._labels(None, number, node, size, clients)
        if truth is not None:
            pixels, classes = known.pixels(truth.inputs), truth.labels.tolist()
            self.figures += gallery.truths(flat_labels(labels), self.targets, pixels, classes, self.images)
        if self.labels["defense"] != "none" and clients is None:
            self.rows.append(self._compare(view, truth, known, stated, with_extras(labels, target=self.targets)))
        for attack in self.attacks:
            self._attack(attack, view, truth, known, self._labels(attack, number, node, size, clients))
        self.targets += 1
        self.write()

    def promise(self, guarantee: Guarantee, number: int) -> None:
        """Add the epsilon that holds after a round to the rows and the page."""
        extra = self.labels["extra"] | {"round": number, "client": None}
        self.rows.append(
            Row(**(self.labels | {"extra": extra}), metric="epsilon", value=guarantee.epsilon, note=str(guarantee))
        )
        self.write()

    def write(self) -> None:
        """Write the rows and the page of all attacks so far."""
        config = {"attack": [str(attack) for attack in self.attacks], "local_steps": self.knowledge.local_steps}
        with page_afterwards(self.out), open_run(self.out, "invert", config, seeds=[self.labels["seed"]]) as run:
            run.add(self.rows)
            run.show(self.figures)

    def _compare(
        self, view: ServerView, truth: Batch | None, known: Knowledge, stated: float | None, labels: dict[str, Any]
    ) -> Row:
        """Return the cosine of a sent update with the plain one, and a note if the defense was not applied."""
        sent, defense = view.sent, labels["defense"]
        update = {name: sent[name] - value for name, value in view.update.values.items()}
        similarity, problem = stated, None if self.upload is None else find_contradiction(self.upload, update)
        if truth is not None:
            local = read_steps(known)
            plain = weights_update(known.net, sent, truth, known.batchnorm, loss=known.loss, turn=local)
            similarity = cosine({name: sent[name] - value for name, value in plain.values.items()}, update)
        if problem is not None:
            note = f"the update is visibly not one of {defense}: {problem}"
        elif similarity is not None and similarity >= IDLE:
            note = f"{defense} changed nothing: the sent update has a cosine of {IDLE} or more with the plain one"
        else:
            note = None
        return Row(**labels, metric=COSINE, value=similarity, note=note)

    def _attack(
        self, attack: Choice, view: ServerView, truth: Batch | None, known: Knowledge, labels: dict[str, Any]
    ) -> None:
        method: InversionAttack = attack.make()
        method.check(known, view)
        begun, seed = time.monotonic(), labels["seed"]
        rng = derive(seed, "reconstruct", attack.name, labels["extra"]["round"], self.targets)
        with progress(f"{attack} in round {labels['extra']['round']}", getattr(method, "iterations", None)) as advance:
            reconstructions = dict(method.reconstruct([[view]], known, [rng], NullWatcher(advance)))
        outcome = judge([truth], [reconstructions.get(0)], known, time.monotonic() - begun, self.scoring)
        self.rows += target_rows(labels, [self.targets], outcome)
        rows = summary_rows(labels, outcome, derive(seed, "bootstrap"))
        self.rows += [
            replace(row, note=join_notes(row.note, self.caution)) if row.metric == "psnr" else row for row in rows
        ]
        self.figures += gallery.draw_figures(flat_labels(labels), [self.targets], outcome, self.images)

    def _labels(
        self, attack: Choice | None, number: int, node: int | None, size: int, clients: int | None
    ) -> dict[str, Any]:
        extra = self.labels["extra"] | {"round": number, "client": node, "batch_size": size, "stage": f"round {number}"}
        if clients is not None:
            extra |= {"view": "sum", "update": f"the sum of {clients} clients, {extra['update']}"}
        if attack is not None:
            what = "an update" if clients is None else "in the sum"
            knows = f"{size} examples {what}, how pixels become inputs, the steps and the learning rate"
            extra |= {"threat": attack.method.info["threat"], "knows": knows}
        return attack_labels(self.labels, extra, attack)
