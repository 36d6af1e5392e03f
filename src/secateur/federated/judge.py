"""How the server's model does on the test part."""

from __future__ import annotations

from torch import nn

from secateur.errors import NotFinite
from secateur.interfaces import Batch, Loss, Params
from secateur.prediction import logits


class Judge:
    """Accuracy and loss on examples that no client has."""

    def __init__(self, net: nn.Module, test: Batch, loss: Loss) -> None:
        self.net, self.test, self.loss = net, test, loss
        self.dtype = next(net.parameters()).dtype

    def __call__(self, state: Params) -> dict[str, float]:
        """Of one model; nothing where there is no test part; none are right where weights or outputs are not finite."""
        if not self.test.size:
            return {}
        if not all(bool(value.isfinite().all()) for value in state.values()):
            return {"test_accuracy": 0.0}
        try:
            found = logits(self.net, state, self.test.inputs.to(self.dtype))
        except NotFinite:  # weights that are still finite may overflow: a federation that diverged goes on as well
            return {"test_accuracy": 0.0}
        right = (found.argmax(1) == self.test.labels).double().mean()
        return {"test_loss": float(self.loss(found, self.test.labels)), "test_accuracy": float(right)}
