"""Theorem 4.1 of priprune by hand, what the printed form gets wrong, and the covariance through products alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, nn

from secateur import tree
from secateur.errors import WrongInput
from secateur.inference import per_example_gradients
from secateur.interfaces import Batch
from secateur.theory.mutual_information import (
    GAUSSIAN,
    Spectrum,
    binary_entropy,
    gradient_spectrum,
    over_rounds,
    single_round,
    single_round_prunefl,
    spectrum_of,
)

CROSS = torch.tensor([[6**0.5, 0.0], [-(6**0.5), 0.0], [0.0, 1.5**0.5], [0.0, -(1.5**0.5)]])  # covariance diag(4, 1)
ONE = Spectrum(torch.ones(1, dtype=torch.float64), 2)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


# Terms ---------------------------------------------------------------------------------------------------------
def test_every_term_by_hand():
    spectrum = spectrum_of(CROSS)
    assert spectrum.eigenvalues.tolist() == pytest.approx([1, 4]) and spectrum.log2_determinant == pytest.approx(2)
    printed, corrected = (getattr(single_round(spectrum, 8, 0.25, 100), form) for form in ("printed", "corrected"))
    assert printed.constant == 1 and printed.mask == pytest.approx(0.75 / (2 * math.log(2)))
    assert (printed.batch, printed.covariance) == pytest.approx((-6, -2))  # 2 log 1/8, 2 log det^(-1/2) 4
    assert printed.dimension == pytest.approx(2 * math.log2(2 * math.pi * math.e))
    assert corrected.constant == 0 and corrected.mask == pytest.approx(100 * 0.8112781)
    assert (corrected.batch, corrected.covariance) == pytest.approx((-3, 1))
    assert corrected.dimension == pytest.approx(GAUSSIAN)
    for form in (printed, corrected):
        parts = (form.constant, form.mask, form.batch, form.covariance, form.dimension)
        assert form.total == pytest.approx(sum(parts)) and form.gradient == pytest.approx(sum(parts[2:]))


def test_corrected_is_the_entropy_of_a_normal_mean():
    from scipy.stats import multivariate_normal

    covariance = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    spectrum = Spectrum(torch.linalg.eigvalsh(covariance.double()), 99)
    expected = multivariate_normal([0, 0], (covariance / 5).numpy()).entropy() / math.log(2)
    assert single_round(spectrum, 5, 0.0, 7).corrected.total == pytest.approx(expected)


def test_prunefl_has_the_highest_over_all_rates():
    spectrum = spectrum_of(CROSS)
    adaptive = single_round_prunefl(spectrum, 4, 50)
    assert adaptive.printed.mask == pytest.approx(1 / (2 * math.log(2))) and adaptive.corrected.mask == 50
    for rate in (0.0, 0.3, 0.5, 0.9):
        fixed = single_round(spectrum, 4, rate, 50)
        assert fixed.printed.total <= adaptive.printed.total and fixed.corrected.total <= adaptive.corrected.total


def test_rounds_multiply_every_term():
    one = single_round(spectrum_of(CROSS), 4, 0.3, 50)
    ten = over_rounds(one, 10)
    assert ten.printed.total == pytest.approx(10 * one.printed.total)
    assert ten.corrected.covariance == pytest.approx(10 * one.corrected.covariance) and ten.printed.constant == 10
    with pytest.raises(WrongInput, match="rounds"):
        over_rounds(one, 0)


@given(st.floats(0, 1))
def test_binary_entropy_is_symmetric(rate):
    assert 0 <= binary_entropy(rate) <= 1 and binary_entropy(rate) == pytest.approx(binary_entropy(1 - rate), abs=1e-9)


# What the printed form gets wrong ------------------------------------------------------------------------------
def test_a_coin_tells_one_bit_where_the_printed_form_allows_less_than_none():
    """A gradient that is -s or s tells which of two examples it is of: one bit, whatever s."""
    small, large = (spectrum_of(torch.tensor([[-s], [s]])) for s in (1.0, 1000.0))
    assert single_round(small, 1, 0.0, 1).printed.total > 1
    assert single_round(large, 1, 0.0, 1).printed.total < 0 < 1
    assert single_round(large, 1, 0.0, 1).corrected.total > 1


def test_the_corrected_form_depends_on_the_resolution_too():
    """The same coin with small gradients: a differential entropy below what is told, until the cell is as small."""
    size = 2.0**-20
    found = single_round(spectrum_of(torch.tensor([[-size], [size]])), 1, 0.0, 1).corrected.total
    assert found < 1 < found - math.log2(size)


@pytest.mark.parametrize("batch_size", [16, 64, 256])
def test_the_mean_of_coins_tells_more_than_the_printed_form_allows(batch_size):
    """The mean of B coins tells how many are heads, which the printed form takes to shrink as 2 log B."""
    from scipy.stats import binom

    told = float(binom(batch_size, 0.5).entropy()) / math.log(2)
    forms = single_round(ONE, batch_size, 0.0, 1)
    assert forms.printed.total < told
    cell = 2 / batch_size  # the mean's own steps
    assert forms.corrected.total - math.log2(cell) == pytest.approx(told, abs=0.02)


def test_larger_gradients_count_as_less_leakage_in_the_printed_form_alone():
    small, large = (single_round(spectrum_of(scale * CROSS), 1, 0.3, 10) for scale in (1.0, 4.0))
    assert large.printed.total == pytest.approx(small.printed.total - 8)  # 2 d* log 4, and the wrong way
    assert large.corrected.total == pytest.approx(small.corrected.total + 4)


def test_a_mask_may_tell_a_bit_a_weight():
    same = spectrum_of(torch.ones(3, 5))  # the gradient tells nothing
    forms = single_round(same, 1, 0.5, 1000)
    assert same.rank == 0 and forms.printed.total < 2 and forms.corrected.total == 1000


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 200))
def test_a_larger_batch_takes_half_a_bit_a_dimension_and_doubling(rank, batch_size):
    spectrum = Spectrum(torch.ones(rank, dtype=torch.float64), rank + 1)
    one, two = (single_round(spectrum, size, 0.1, 5) for size in (batch_size, 2 * batch_size))
    assert two.corrected.total == pytest.approx(one.corrected.total - rank / 2)
    assert two.printed.total == pytest.approx(one.printed.total - 2)  # whatever the dimension


# Covariance ----------------------------------------------------------------------------------------------------
@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(1, 15), st.integers(0, 99))
def test_products_give_the_eigenvalues_of_the_covariance(examples, size, seed):
    gradients = normal(examples, size, seed=seed) + 3
    plain = torch.linalg.eigvalsh(torch.cov(gradients.T).reshape(size, size))
    found = spectrum_of(gradients)
    assert found.rank == min(examples - 1, size)
    torch.testing.assert_close(found.eigenvalues, plain[-found.rank :], rtol=1e-9, atol=1e-12)


def test_equal_examples_add_no_dimension():
    rows = normal(4, 30)
    assert spectrum_of(torch.cat([rows, rows, rows[:1]])).rank == 3
    with pytest.raises(WrongInput, match="at least 2"):
        spectrum_of(rows[:1])
    with pytest.raises(WrongInput, match="not finite"):
        spectrum_of(rows * math.nan)


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))


@pytest.mark.parametrize("memory", [None, 8 * 77 * 3, 1])  # all at once, three examples a block, one
def test_a_network_by_blocks_as_by_the_plain_covariance(network, memory):
    batch = Batch(normal(7, 1, 5, 5), torch.tensor([0, 1, 2, 0, 1, 2, 0]))
    mask = {"3.weight": torch.arange(54).reshape(3, 18) % 3 > 0}
    state = tree.state_of(network)
    found = gradient_spectrum(network, state, Batch(batch.inputs.float(), batch.labels), mask, memory=memory)
    double = {name: value.double() for name, value in state.items()}
    grads = per_example_gradients(network, double, Batch(batch.inputs.float().double(), batch.labels))
    rows = torch.cat([value.flatten(1) for value in tree.mask_tree(grads, mask).values()], 1)
    plain = torch.linalg.eigvalsh(torch.cov(rows.T))
    assert found.rank == 6 and found.eigenvalues.dtype == torch.float64
    torch.testing.assert_close(found.eigenvalues, plain[-6:], rtol=1e-9, atol=1e-15)


def test_what_the_mask_drops_is_no_part_of_the_covariance(network):
    batch = Batch(normal(5, 1, 5, 5).float(), torch.tensor([0, 1, 2, 0, 1]))
    state = tree.state_of(network)
    nothing = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in network.named_parameters()}
    assert gradient_spectrum(network, state, batch, nothing).rank == 0
    biases = nothing | {"3.bias": torch.ones(3, dtype=torch.bool)}
    assert gradient_spectrum(network, state, batch, biases).rank == 2  # softmax less one-hot: they sum to 0


@pytest.mark.parametrize(("field", "values"), [("rate", (4, 1.5, 9)), ("batch_size", (0, 0.5, 9))])
def test_what_is_no_rate_and_no_batch_is_refused(field, values):
    with pytest.raises(WrongInput, match=field):
        single_round(ONE, *values)
