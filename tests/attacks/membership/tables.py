"""Black boxes whose answers are written down, and small networks that memorise, for the attacks' tests."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur.data.embedded import digits
from secateur.data.partition import in_out
from secateur.interfaces import Batch, BlackBox, InOut


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(*indices, label=0):
    """Inputs that a table's box reads as row numbers, all with one label."""
    return Batch(torch.tensor(indices, dtype=torch.float64)[:, None], torch.full((len(indices),), label))


def table(*confidences):
    """A two-class box that answers row i with (confidences[i], 1 - confidences[i])."""
    p = torch.tensor(confidences, dtype=torch.float64)
    answers = torch.stack([p, 1 - p], 1)
    return BlackBox(lambda inputs: answers[inputs[:, 0].long()])


def memorise(batch, seed, classes, steps=100, width=64):
    """A black box of a small network that was trained on a batch until it knows it by heart."""
    generator = rng(seed)
    shapes = [(width, batch.inputs[0].numel()), (width,), (classes, width), (classes,)]
    weights = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    weights = [nn.Parameter(w if w.ndim == 2 else torch.zeros_like(w)) for w in weights]
    optimiser = torch.optim.Adam(weights, lr=5e-3)

    def logits(inputs):
        hidden = torch.relu(inputs.flatten(1) @ weights[0].T + weights[1])
        return hidden @ weights[2].T + weights[3]

    for _ in range(steps):
        optimiser.zero_grad()
        cross_entropy(logits(batch.inputs), batch.labels).backward()
        optimiser.step()
    return BlackBox(lambda inputs: logits(inputs).detach().softmax(1))


def noisy_digits(number, seed=1, noise=0.2):
    """Digits of which a share has random labels: what a model can only know by heart."""
    data, generator = digits(), rng(seed)
    some = torch.randperm(len(data.labels), generator=generator)[:number]
    wrong = torch.rand(number, generator=generator) < noise
    labels = torch.where(wrong, torch.randint(10, (number,), generator=generator), data.labels[some])
    return Batch(data.inputs[some], labels)


def in_out_digits(number=400, models=16, **training):
    """In-out models over noisy digits, and a target trained on half of them, with the truth."""
    pool = noisy_digits(number)
    membership = in_out(number, models, rng(2))
    boxes = [memorise(pool.take(inside), seed, 10, **training) for seed, inside in enumerate(membership)]
    truth = torch.randperm(number, generator=rng(3)) < number // 2
    target = memorise(pool.take(truth), 99, 10, **training)
    return InOut(boxes, pool, membership), target, truth
