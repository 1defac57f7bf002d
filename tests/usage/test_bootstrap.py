import dataclasses

import numpy as np
import pytest

from rtk.errors import SmallSampleWarning, TraceError
from rtk.usage import bootstrap


def test_traces_of_one_prompt_go_together(trace):
    other = dataclasses.replace(trace, prompt_tokens=2, logprobs=None)
    numbers = bootstrap.prompt_numbers([trace, other, trace])
    assert numbers.tolist() == [0, 1, 0]
    assert bootstrap.by_prompt([[1, 2], [10, 20], [100, 200]], numbers).tolist() == [[101, 202], [10, 20]]


def test_a_ratio_is_one_of_sums_by_hand():
    part, whole = np.array([[1.0], [3.0]]), np.array([2.0, 4.0])
    assert bootstrap.ratio(part, whole).tolist() == [4 / 6]
    twice_the_first, one_each = [2, 0], [1, 1]
    drawn = np.array([twice_the_first, one_each], dtype=float)
    assert bootstrap.ratio(part, whole, drawn).tolist() == [[1 / 2], [4 / 6]]


def test_each_resample_draws_as_many_prompts_and_a_seed_repeats_it():
    drawn = bootstrap.draws(12, 50, seed=3)
    assert (drawn.sum(axis=1) == 12).all()
    assert np.array_equal(drawn, bootstrap.draws(12, 50, seed=3))
    assert not np.array_equal(drawn, bootstrap.draws(12, 50, seed=4))


def test_no_resamples_are_refused():
    with pytest.raises(TraceError, match="resamples is 0"):
        bootstrap.draws(12, 0, seed=0)


def test_the_interval_agrees_with_scipys():
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(0)
    whole = rng.integers(5, 40, 25).astype(float)
    part = rng.binomial(whole.astype(int), rng.beta(2, 5, 25)).astype(float)
    low, high = bootstrap.interval(part[:, None], whole, bootstrap.draws(25, 20_000, seed=0))
    theirs = stats.bootstrap(
        (part, whole),
        lambda x, y, axis: x.sum(axis=axis) / y.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        method="percentile",
        rng=1,
    ).confidence_interval
    assert low[0] == pytest.approx(theirs.low, abs=0.003)
    assert high[0] == pytest.approx(theirs.high, abs=0.003)


def coverage(prompts: int, *, by_token: bool = False) -> float:
    """How often the interval holds the truth, where each prompt has a rate of its own around it."""
    rng = np.random.default_rng(prompts)
    hits = 0
    for trial in range(400):
        rate = rng.beta(2, 4, prompts)  # mean 1/3
        part = rng.binomial(50, rate).astype(float)
        whole = np.full(prompts, 50.0)
        if by_token:
            part = np.concatenate([np.repeat([1.0, 0.0], [int(n), 50 - int(n)]) for n in part])
            whole = np.ones(len(part))
        low, high = bootstrap.interval(part[:, None], whole, bootstrap.draws(len(whole), 200, seed=trial))
        hits += bool(low[0] <= 1 / 3 <= high[0])
    return hits / 400


def test_intervals_over_prompts_hold_the_truth_about_as_often_as_they_say():
    assert 0.91 <= coverage(40) <= 0.98
    # The fewest that get an interval: too narrow, but not by much.
    assert 0.86 <= coverage(bootstrap.MIN_PROMPTS) <= 0.96


def test_intervals_over_tokens_would_not():
    assert coverage(20, by_token=True) < 0.75


def test_too_few_prompts_have_no_interval_and_are_told_of():
    few = np.ones((bootstrap.MIN_PROMPTS - 1, 1))
    low, high = bootstrap.interval(few, few[:, 0], bootstrap.draws(len(few), 100, seed=0))
    assert np.isnan([low[0], high[0]]).all()
    with pytest.warns(SmallSampleWarning, match="^loads: 9 distinct prompts are too few"):
        bootstrap.warn_if_few(9, "loads")


def test_prompts_without_anything_do_not_count():
    whole = np.array([1.0] * 9 + [0.0] * 20)
    assert bootstrap.counted(whole) == 9
    low, _ = bootstrap.interval(whole[:, None], whole, bootstrap.draws(len(whole), 50, seed=0))
    assert np.isnan(low[0])


def test_a_resample_without_anything_says_nothing():
    part, whole = np.ones((10, 1)), np.ones(10)
    part[0], whole[0] = 0, 0
    whole = np.append(whole, 1.0)
    part = np.append(part, [[1.0]], axis=0)
    drawn = np.zeros((2, 11))
    drawn[0, 0] = drawn[1, 1] = 11
    low, high = bootstrap.interval(part, whole, drawn)
    assert (low[0], high[0]) == (1, 1)
