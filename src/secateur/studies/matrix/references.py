"""Reference models of an attacker who knows of a federation's defense: its network, and final models under it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Generator, nn

from secateur.config import defense as read_defense
from secateur.data.partition import Part
from secateur.errors import NotFinite
from secateur.evaluation.client import protect
from secateur.experiments.context import SeedContext
from secateur.experiments.pipeline import VICTIM, ModelFactory
from secateur.experiments.threat_models import Compression
from secateur.inference import bind_state
from secateur.interfaces import Params
from secateur.runs.artifacts import Result
from secateur.seeding import derive, draw_seed
from secateur.studies.matrix.ground import MatrixSetting

TRIALS = 3  # of a reference federation that diverges


@dataclass(frozen=True)
class ProtectedContext(SeedContext):
    """A context whose networks have the part that a defense adds to them, such as PRECODE's bottleneck.

    Whoever has the final model sees that part, so all reference models have it. No noise is drawn: an answer is that of
    the mean.
    """

    defense: str = "none"

    def build(self, rng: Generator) -> nn.Module:
        """Return the network with the defense's part of it, which `rng` draws too."""
        net, added = protect(super().build(rng), read_defense(self.defense), self.data.classes, rng)
        return net if added is None else net.to(self.device)  # its noise, which no state holds, has no other way there


class ImitatingFactory(ModelFactory):
    """A maker of models whose reference models are trained as the victim was: by clients, under the row's defense.

    Each has clients, first weights and draws of its own, and a half of the candidates for members.
    """

    def __init__(
        self,
        context: SeedContext,
        parts: dict[str, Part],
        setting: MatrixSetting,
        train: Callable[[MatrixSetting], Params],
    ) -> None:
        super().__init__(context, parts)
        self.setting, self.train = setting, train

    def _make(self, compression: Compression, roles: tuple[str, ...]) -> dict[str, Result]:
        make = super()._make
        return {
            role: make(compression, (role,))[role] if role == VICTIM else self._imitate(compression, role)
            for role in roles
        }

    def _imitate(self, compression: Compression, role: str) -> Result:
        """Return the final model of a training on a role's rows, as a stage of the run.

        A training that diverges tells an attacker nothing, and is tried again from other first weights. Its weights
        may be finite, and its answers not.
        """
        setting, part = self.setting, self.parts[role]
        data, rows = setting.data, torch.cat([part.train, part.test])
        ground = replace(data, inputs=data.inputs[rows], labels=data.labels[rows], train_size=part.train.numel())
        (job,) = self.jobs(compression, [role])
        terms = asdict(setting.step) | {"measures": None, "defense": setting.defense, "rounds": setting.scale.rounds}
        terms |= {name: getattr(setting.scale, name) for name in ("clients", "batch_size", "learning_rate")}

        def train() -> Result:
            for trial in range(TRIALS):
                rng = derive(setting.seed, "imitate", role, *([trial] if trial else []))
                model = self.train(replace(setting, data=ground, seed=draw_seed(rng, below=2**31)))
                try:
                    bind_state(self.context.net, model, self.context.device)(self.context.rows(rows).inputs)
                    break
                except NotFinite:
                    continue
            return Result(model)

        return setting.run.stage("imitate", job.base | terms, train)
