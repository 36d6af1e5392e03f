"""Filters for NVIDIA FLARE: one rewrites an update before it leaves a client, one attacks what leaves it.

    job.to(UploadFilter("dgp:k1=0.05:k2=0.75"), "site-1", tasks=["train"], filter_type=FilterType.TASK_RESULT)

Executors that send weights (WEIGHTS) need the same filter among the TASK_DATA filters too, which keeps the received
model. Those that send differences (WEIGHT_DIFF) do not. Both filters fail closed: what they cannot read or defend is
not sent, and the server receives FLARE's code of a filter error. Install with pip install 'secateur-audit[flare]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.config.methods import defense as read_defense
from secateur.defenses.effect import IDLE, cosine
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.soteria import Soteria
from secateur.defenses.uploads import find_aligned, inner_of, makes_anew
from secateur.errors import WrongInput, require
from secateur.federated.auditor import Auditor
from secateur.interfaces import Batch, Knowledge, Params, Upload, UploadContext
from secateur.models.create import create
from secateur.seeding import derive

require("nvflare", "flare")
from nvflare.apis.dxo import DXO, DataKind, from_shareable  # noqa: E402
from nvflare.apis.dxo_filter import DXOFilter  # noqa: E402
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import Shareable  # noqa: E402
from nvflare.app_common.app_constant import AppConstants  # noqa: E402

KINDS = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm: sent unchanged
RECEIVED = "secateur.received"  # the property of the task's context that holds the received model


class ClosedFilter(DXOFilter):
    """A filter of updates that lets nothing else pass; FLARE's own filters pass on what they do not know."""

    def __init__(self) -> None:
        super().__init__(supported_data_kinds=KINDS, data_kinds_to_filter=KINDS)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Filter a result; keep the model of a task; refuse what is no update."""
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            fl_ctx.set_prop(RECEIVED, _model_in(shareable), private=True, sticky=False)
            return shareable
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable  # an error, without data
        try:
            kind = from_shareable(shareable).data_kind
        except Exception as error:
            raise WrongInput("result", f"holds no DXO ({error}); send weights, or no result") from error
        if kind not in KINDS:
            raise WrongInput("result", f"is of kind {kind}; allowed: {', '.join(KINDS)}")
        return super().process(shareable, fl_ctx)


class UploadFilter(ClosedFilter):
    """A filter that rewrites a client's update by a defense of Secateur (`secateur list defenses`).

    The update is received minus trained weights. Residuals stay in the filter, and are lost with the job's process.
    The log has the cosine of the update and of what is sent: a defense that changes nothing is called so.

    Args:
        defense: the upload defense, such as "dgp:k1=0.05:k2=0.75+error-feedback".
        buffers: suffixes of the names of tensors that are sent unchanged; integer tensors always are.
        seed: makes noise repeatable, for tests only: anyone who knows the seed can subtract the noise.
    """

    def __init__(self, defense: str, buffers: list[str] | None = None, seed: int | None = None) -> None:
        super().__init__()
        self.defense, self.buffers, self.seed = defense, list(buffers or BUFFERS), seed
        self._upload = _read_upload(defense)
        self._state: Params | None = None

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Return the update as it is sent."""
        received = fl_ctx.get_prop(RECEIVED)
        update, others = _split_update(dxo, received, tuple(self.buffers))
        number = int(shareable.get_header(AppConstants.CURRENT_ROUND) or 0)
        before = self._upload.init(update) if self._state is None else self._state
        sent, after = self._upload(update, before, self._context(number, fl_ctx))
        if not all(bool(value.isfinite().all()) for value in sent.values()):
            raise WrongInput("defense", f"{self.defense} made numbers that are not finite; nothing is sent")
        self._state = after
        self._say(cosine(update, sent), tree.count(update), fl_ctx)
        whole = {name: value for name, value in dxo.data.items() if name in others}
        for name, value in sent.items():
            new = -value if dxo.data_kind == DataKind.WEIGHT_DIFF else _tensor(received[name]) - value
            whole[name] = new.to(_tensor(dxo.data[name]).dtype).numpy()
        dxo.data = {name: whole[name] for name in dxo.data}
        return dxo

    def _say(self, similarity: float, size: int, fl_ctx: FLContext) -> None:
        text = f"{self.defense}: cosine of the update ({size} values) and of what is sent {similarity:.6f}"
        if similarity >= IDLE:
            self.log_warning(fl_ctx, f"{text}; this defense does nothing: the update is sent as it is")
        else:
            self.log_info(fl_ctx, text)

    def _context(self, number: int, fl_ctx: FLContext) -> UploadContext:
        rng = Generator()
        if self.seed is None:
            rng.seed()
        else:
            rng = derive(self.seed, "upload", number, fl_ctx.get_identity_name())
        nothing = Batch(torch.empty(0), torch.empty(0, dtype=torch.int64))
        return UploadContext(nn.Identity(), {}, nothing, number, rng)


class AuditFilter(ClosedFilter):
    """A filter at a client that attacks what leaves it, as the server could, and writes a page; it changes nothing.

    Put it after UploadFilter, and among the TASK_DATA filters too: the attack needs the received model.

    Args:
        model: the network, a name of Secateur's or module:function.
        input_shape: of an example.
        classes: number of classes.
        learning_rate: of the client's SGD.
        out: folder of the page.
        attack: inversion attacks, comma-separated.
        defense: name of the defense before it.
        batch_size: examples of an update.
        local_steps: of a round.
        every: rounds from one attack to the next.
        iterations: of an attack; None: those of its paper.
    """

    def __init__(
        self,
        model: str,
        input_shape: list[int],
        classes: int,
        learning_rate: float,
        out: str,
        attack: str = "ig:tv=0.0001",
        defense: str = "none",
        batch_size: int = 1,
        local_steps: int = 1,
        every: int = 1,
        iterations: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.input_shape, self.classes = model, list(input_shape), classes
        self.learning_rate, self.batch_size, self.local_steps = learning_rate, batch_size, local_steps
        self.out, self.attack, self.defense, self.every, self.iterations = out, attack, defense, every, iterations
        self._auditor: Auditor | None = None
        self._turns = 0

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Attack the update."""
        received = fl_ctx.get_prop(RECEIVED)
        if received is None:
            raise WrongInput("filter", "the received model is unknown; add this filter to the TASK_DATA filters too")
        self._turns += 1
        if (self._turns - 1) % self.every:
            return
        sent = {name: _tensor(value) for name, value in received.items()}
        change = dxo.data_kind == DataKind.WEIGHT_DIFF
        weights = {n: sent[n] + _tensor(v) if change else _tensor(v) for n, v in dxo.data.items()}
        if self._auditor is None:
            self._auditor = self._build(fl_ctx)
        number = int(shareable.get_header(AppConstants.CURRENT_ROUND) or self._turns - 1)
        self._auditor(number, None, sent, weights)
        self.log_info(fl_ctx, f"attacked the update of round {number}: {self.out}/report.html")

    def _build(self, fl_ctx: FLContext) -> Auditor:
        net = create(self.model, tuple(self.input_shape), self.classes, derive(0, "structure"))
        ones = torch.ones(self.input_shape[0], *(1 for _ in self.input_shape[1:]))
        local: dict[str, Any] = {"local_steps": self.local_steps, "learning_rate": self.learning_rate}
        known = Knowledge(
            net, tuple(self.input_shape), self.classes, 0 * ones, ones, batch_size=self.batch_size, **local
        )
        over: dict[str, Any] = {} if self.iterations is None else {"iterations": self.iterations}
        folder = Path(self.out) / fl_ctx.get_identity_name()
        return Auditor(known, self.attack.split(","), folder, defense=self.defense, name=self.model, **over)


def _read_upload(text: str) -> Upload:
    """Return the upload of a defense; refuse one that needs more than a filter can see."""
    upload = upload_of(read_defense(text))
    if upload is None:
        raise WrongInput("defense", f"{text} does not act on an upload; use one such as dgp, or leave the filter out")
    if find_aligned(upload) is not None:
        raise WrongInput("defense", f"{text} lets one client choose the positions of all; use dgp")
    if isinstance(inner_of(upload), Soteria) or makes_anew(upload):
        raise WrongInput("defense", f"{text} needs the examples of an update, which a filter does not see; use another")
    return upload


def _model_in(shareable: Shareable) -> dict[str, Any] | None:
    """Return the weights of a task, if it has any."""
    try:
        dxo = from_shareable(shareable)
    except Exception:
        return None
    return dict(dxo.data) if dxo.data_kind == DataKind.WEIGHTS else None


def _split_update(dxo: DXO, received: dict[str, Any] | None, buffers: tuple[str, ...]) -> tuple[Params, set[str]]:
    """Return the update, received minus trained, and the names that are sent unchanged."""
    values = {name: _tensor(value) for name, value in dxo.data.items()}
    others = {n for n, value in values.items() if not value.is_floating_point() or n.endswith(buffers)}
    if dxo.data_kind == DataKind.WEIGHT_DIFF:
        update = {name: -value for name, value in values.items() if name not in others}
    elif received is None:
        raise WrongInput("filter", "weights came without the received model; add this filter to the TASK_DATA filters")
    elif missing := [name for name in values if name not in received]:
        raise WrongInput("result", f"{missing[0]} is not in the received model; names must be equal")
    else:
        update = {name: _tensor(received[name]) - value for name, value in values.items() if name not in others}
    if not update:
        raise WrongInput("result", "holds no weights to defend; nothing is sent")
    if not all(bool(value.isfinite().all()) for value in update.values()):
        raise WrongInput("result", "holds numbers that are not finite; nothing is sent")
    return update, others


def _tensor(value: Any) -> Tensor:
    return value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)
