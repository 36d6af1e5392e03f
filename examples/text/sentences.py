"""Sentences of the standard library's docstrings, by package, and a small network that tells the packages apart.

Nothing is downloaded: the text comes with Python. Run it in this folder with:

    secateur audit --model sentences:net --data sentences:data --pruner l1-unstructured

or with the settings of a run file, `secateur audit audit.yaml --trust`.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

PACKAGES = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "xml")
WORDS = 2000  # of the vocabulary; 0 is padding, 1 an unknown word
LENGTH = 24  # words of a sentence
EACH = 300  # sentences of a package, at most


def data() -> tuple[Tensor, Tensor]:
    """Return (N, 24) tokens and (N,) packages of all sentences, in an order that mixes the packages."""
    texts = [(words, label) for label, package in enumerate(PACKAGES) for words in _sentences(package)]
    counts = Counter(word for words, _ in texts for word in words)
    known = {word: i for i, (word, _) in enumerate(sorted(counts.items(), key=lambda item: (-item[1], item[0])), 2)}
    tokens = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, (words, _) in enumerate(texts):
        numbers = [known[word] if known[word] < WORDS else 1 for word in words[:LENGTH]]
        tokens[row, : len(numbers)] = torch.tensor(numbers)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    return tokens[order], torch.tensor([label for _, label in texts])[order]


def net() -> nn.Module:
    """Return an embedding, averaged over the words, and two layers."""
    return Bag(WORDS, len(PACKAGES))


class Bag(nn.Module):
    """A network over the mean of a sentence's embedded words."""

    def __init__(self, words: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 48, padding_idx=0)
        self.hidden, self.last = nn.Linear(48, 64), nn.Linear(64, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (N, classes) logits of (N, length) tokens."""
        number = (tokens != 0).sum(1, keepdim=True).clamp_min(1)
        mean = self.embedding(tokens).sum(1) / number
        return self.last(torch.relu(self.hidden(mean)))  # type: ignore[no-any-return]


def _sentences(package: str) -> list[list[str]]:
    """Return the different sentences of a package's docstrings, as lists of words."""
    sentences: dict[tuple[str, ...], None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for sentence in re.split(r"[.!?]\s|\n\s*\n", ast.get_docstring(node) or ""):
                    words = tuple(re.findall(r"[a-z]{2,}", sentence.lower()))
                    if len(words) >= 4:
                        sentences[words] = None
    return [list(words) for words in sentences][:EACH]
