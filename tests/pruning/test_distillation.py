"""Distillation: the divergence by hand, and a student that learns from its teacher alone."""

import math

import pytest
import torch
from torch import nn

from secateur.interfaces import Batch
from secateur.pruning.distillation import Distil, divergence
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit
from secateur.tree import state_of


def test_the_divergence_by_hand():
    """p = (3/4, 1/4) and q = (1/2, 1/2) at temperature 2: 4 * (3/4 ln(3/2) + 1/4 ln(1/2))."""
    wanted = torch.tensor([[2 * math.log(3.0), 0.0]], dtype=torch.float64)
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert float(divergence(wanted, torch.zeros(1, 2, dtype=torch.float64), 2.0)) == pytest.approx(expected, abs=1e-12)


def test_a_student_learns_the_answers_of_its_teacher_where_labels_say_nothing(rng):
    teacher = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        teacher[0].weight.copy_(3 * torch.randn(3, 4, generator=rng))
    inputs = torch.randn(200, 4, generator=rng)
    batch = Batch(inputs, torch.zeros(200, dtype=torch.long))  # every label is 0
    method, student = Distil(student="mlp", weight=1.0), nn.Sequential(nn.Linear(4, 3))
    recipe = Recipe(epochs=60, batch_size=50, learning_rate=0.05, patience=None)
    options = {"loss": method.share(nn.functional.cross_entropy), "guide": method.guide(teacher, torch.device("cpu"))}
    fitted = fit(student, Task(state_of(student), batch, batch, rng), recipe, **options)
    student.load_state_dict(fitted.state)
    agreement = (student(inputs).argmax(1) == teacher(inputs).argmax(1)).double().mean()
    assert agreement > 0.95
