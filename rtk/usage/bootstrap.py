"""How far a share would move with other prompts: the bootstrap, with prompts as what is drawn.

Tokens of one text are alike, and so are several samples of one prompt; intervals that take them for independent come
out far too narrow. So whole prompts are drawn with replacement (a cluster bootstrap: Davison and Hinkley, "Bootstrap
Methods and their Application", 1997, section 3.8; Miller, arXiv 2411.00640, for language models), and all traces of
the same prompt go together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rtk.errors import SmallSampleWarning, TraceError
from rtk.trace.route_trace import RouteTrace

# The percentile interval of few prompts is too narrow: simulated as in tests/test_bootstrap.py, one of 3, 5, 10 and 20
# prompts holds the truth in 71, 83, 88 and 92 % of trials.
MIN_PROMPTS = 10
LEVEL = 0.95

Floats = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]


def prompt_numbers(traces: Iterable[RouteTrace]) -> Groups:
    """int64 `[traces]`: the same number for traces whose prompts hold the same tokens, from 0 without gaps."""
    seen: dict[bytes, int] = {}
    prompts = (trace.token_ids[: trace.prompt_tokens].tobytes() for trace in traces)
    return np.array([seen.setdefault(prompt, len(seen)) for prompt in prompts], dtype=np.int64)


def by_prompt(values: npt.ArrayLike, numbers: Groups) -> Floats:
    """One array a trace, added up by prompt: float64 `[prompts, ...]`."""
    stacked = np.asarray(values, dtype=np.float64)
    total = np.zeros((int(numbers.max()) + 1, *stacked.shape[1:]))
    np.add.at(total, numbers, stacked)
    return total


def draws(prompts: int, resamples: int, seed: int) -> Floats:
    """float64 `[resamples, prompts]`: how often each prompt is drawn, `prompts` times in all.

    Raises:
        TraceError: there are to be no resamples.
    """
    if resamples < 1:
        raise TraceError(
            f"resamples is {resamples}; the bootstrap needs at least 1, and some 1000 to be steady"
        )
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)


def ratio(part: Floats, whole: Floats, drawn: Floats | None = None) -> Floats:
    """Sums of `part` over sums of `whole`, over all prompts or, where drawn, over each resample's.

    Args:
        part: `[prompts, n]`.
        whole: `[prompts]`.
        drawn: `[resamples, prompts]`.

    Returns:
        float64 `[n]`, or `[resamples, n]`; NaN where the whole is 0.
    """
    above, below = (
        (part.sum(axis=0), whole.sum()) if drawn is None else (drawn @ part, (drawn @ whole)[:, None])
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(above / below)


def interval(part: Floats, whole: Floats, drawn: Floats) -> tuple[Floats, Floats]:
    """The percentile interval of a ratio of sums, at 95 %.

    Args:
        part, whole, drawn: as `ratio`.

    Returns:
        low and high, float64 `[n]` each; NaN of fewer than `MIN_PROMPTS` prompts with a whole.
    """
    if not enough(counted(whole)):
        nothing = np.full(part.shape[1], np.nan)
        return nothing, nothing
    resampled = ratio(part, whole, drawn)
    tail = (1 - LEVEL) / 2
    # A resample may hold none of the prompts that have a whole, and then says nothing.
    low, high = np.quantile(resampled[np.isfinite(resampled[:, 0])], [tail, 1 - tail], axis=0)
    return low, high


def enough(prompts: int) -> bool:
    """Whether there are prompts enough for an interval."""
    return prompts >= MIN_PROMPTS


def counted(whole: Floats) -> int:
    """How many prompts have anything that is counted."""
    return int(np.count_nonzero(whole))


def warn_if_few(prompts: int, what: str) -> None:
    """Warn, on behalf of the public function that calls, where there are too few prompts for an interval."""
    if not enough(prompts):
        warnings.warn(
            f"{what}: {prompts} distinct prompts are too few to say how far this would move with other prompts; "
            f"at least {MIN_PROMPTS} are needed, so there is no interval (enough_prompts is False)",
            SmallSampleWarning,
            stacklevel=3,
        )
