"""SAMIA: a transformer over the classes that learns a threshold for each answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import gelu, one_hot

from secateur.attacks.membership.neural import Drop, NetworkAttack, keep
from secateur.catalogue import method
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox
from secateur.metrics.gaps import sensitivity

WIDTH, HEADS, HIDDEN, LAYERS = 64, 4, 128, 3


class Encoder(nn.Module):
    """Post-norm transformer layer: attention and a feed-forward block, each with a residual connection and LayerNorm.

    The layer of torch is slower: it draws dropout one number at a time and guards the softmax, which is not needed
    here. The tokens of all examples are rows of one matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.attended = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, WIDTH)
        self.normal = nn.LayerNorm(WIDTH)
        nn.init.xavier_uniform_(self.queries_keys_values.weight)
        nn.init.zeros_(self.queries_keys_values.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor, tokens: int, drop: Drop) -> Tensor:
        """Map tokens (N tokens, 64) to (N tokens, 64)."""
        x = self.attended(x + drop(self.output(self.attend(x, tokens, drop))))
        return self.normal(x + drop(self.narrow(drop(gelu(self.widen(x))))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, tokens: int, drop: Drop) -> Tensor:
        """Return softmax(Q K^T / sqrt d) V of all heads."""
        size = WIDTH // HEADS
        parts = self.queries_keys_values(x).view(-1, tokens, 3, HEADS, size).permute(2, 0, 3, 1, 4)
        q, k, v = parts.reshape(3, -1, tokens, size).unbind()  # (N heads, tokens, size) each
        weights = torch.bmm(q * size**-0.5, k.transpose(1, 2)).softmax(2)
        heads = torch.bmm(drop(weights), v)
        return heads.view(-1, HEADS, tokens, size).transpose(1, 2).reshape(-1, WIDTH)


class Transformer(nn.Module):
    """Transformer of Fig. 5: one token (p_k, s_k, 1[y = k]) a class without positions, three layers, two outputs."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.scale = nn.BatchNorm1d(3 * classes)
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Encoder() for _ in range(LAYERS))
        self.join = nn.Linear(classes * WIDTH, WIDTH)
        self.decide = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, drop: Drop = keep) -> Tensor:
        """Return logits (N, 2), non-member and member, of probabilities, sensitivities and one-hot labels (N, 3K)."""
        tokens = self.scale(x).view(-1, 3, self.classes).transpose(1, 2).reshape(-1, 3)
        tokens = gelu(self.embed(tokens))
        for layer in self.layers:
            tokens = layer(tokens, self.classes, drop)
        joined = self.join(tokens.view(len(x), -1)).relu()
        return self.decide(joined)  # type: ignore[no-any-return]


@method("attack", "samia", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Samia(NetworkAttack):
    """A transformer tells members by probabilities, sensitivities and the true label (samia_ppb 4.2, SAMIA).

    Equation: `score = T(p, s, y); s_k = mean over 10 directions d of |p_k(x + eps d) - p_k(x)| / eps (Eq. 2)`.
    """

    patience: int = 2  # the value in the measurements of benchmarks/audit.py

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return p, s (Eq. 2) and the one-hot label, (N, 3K), from 11 queries an example."""
        p = probabilities(box, batch.inputs)
        sensitivities = sensitivity(box, batch.inputs, rng, shared=True, answers=p)
        return torch.cat([p, sensitivities, one_hot(batch.labels, p.shape[1]).to(p)], 1)

    def network(self, features: int) -> nn.Module:
        """Return the transformer of Fig. 5."""
        return Transformer(features // 3)
