"""Where two sides disagree more than two engines naturally do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtk.replay.checks.two_sides import Sides

# R3 (arXiv 2510.11370) reports about 10 % of routers that choose other experts in training than in rollout, for
# the same weights. A layer, or a span of tokens, in which a quarter differs is past what it calls natural.
MIN_AGREEMENT = 0.75
_BINS = 256
# Log-likelihood ratio, in nats, that a span must reach: about e^-15 by accident, times the spans that are tried.
_EVIDENCE = 15.0
# A smaller drop counts too where it is steep against the rest, as after a small weight update.
_STRONG_EVIDENCE, _STEEP = 25.0, 4.0


@dataclass(frozen=True, eq=False)
class Region:
    """A part of the table of routers by rows.

    Attributes:
        routers: bool `[routers]`.
        start, stop: rows, half open.
        agreement: the share of routers in it that agree.
    """

    routers: npt.NDArray[np.bool_]
    start: int
    stop: int
    agreement: float


def find(sides: Sides, *, min_agreement: float) -> Region | None:
    """The region with too low an agreement; None where there is none.

    With `sides.exact` it spans all routers and rows that differ at all. Otherwise it is a span of tokens that
    agrees much less than the rest, or else the layers below `min_agreement`.
    """
    same, compared = sides.same, sides.compared
    if not compared.any() or not len(same):
        return None
    if sides.exact:
        bad = ~same & compared
        if not bad.any():
            return None
        rows = np.flatnonzero(bad.any(axis=0))
        routers = np.asarray(bad.any(axis=1))
        return _region(same, compared, routers, int(rows[0]), int(rows[-1]) + 1)
    columns = np.flatnonzero(compared)
    span = _span(~same[:, columns])
    low: npt.NDArray[np.bool_] = np.less(same[:, columns].mean(axis=1), min_agreement)
    # All rows of all layers are the plainer answer where the whole shard disagrees.
    if span is not None and (span[1] - span[0] < 0.95 * len(columns)):
        start, stop = int(columns[span[0]]), int(columns[span[1] - 1]) + 1
        inside = same[:, start:stop][:, compared[start:stop]].mean(axis=1)
        # Where no layer is as bad as that, all of them are the region: a small drop is not of one layer.
        routers = np.less(inside, min_agreement)
        if not routers.any():
            routers = np.ones(len(same), bool)
        return _region(same, compared, routers, start, stop)
    if low.any():
        return _region(same, compared, low, int(columns[0]), int(columns[-1]) + 1)
    return None


def whole(sides: Sides) -> Region:
    """All routers and rows."""
    return _region(sides.same, sides.compared, np.ones(len(sides.same), bool), 0, len(sides.compared))


def _region(
    same: npt.NDArray[np.bool_],
    compared: npt.NDArray[np.bool_],
    routers: npt.NDArray[np.bool_],
    start: int,
    stop: int,
) -> Region:
    part = same[routers, start:stop][:, compared[start:stop]]
    return Region(routers, start, stop, float(part.mean()) if part.size else 1.0)


def _span(bad: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """The span of rows in which far more routers disagree than outside it, if there is one.

    A scan statistic: over all spans the one with the largest log-likelihood ratio of two Bernoulli rates
    against one (Kulldorff 1997), divided by how much more the rows vary than independent routers would, since
    the layers of one token err together.
    """
    routers, rows = bad.shape
    if rows < 4:
        return None
    edges = np.unique(np.linspace(0, rows, min(_BINS, rows) + 1).astype(np.int64))
    totals = np.concatenate([[0], bad.sum(axis=0).cumsum()])[edges].astype(float)
    sizes = edges.astype(float) * routers
    hits = totals[None, :] - totals[:, None]
    cells = sizes[None, :] - sizes[:, None]
    all_hits, all_cells = totals[-1], sizes[-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        inside, outside = hits / cells, (all_hits - hits) / (all_cells - cells)
        gain = (
            _log_likelihood(hits, cells)
            + _log_likelihood(all_hits - hits, all_cells - cells)
            - _log_likelihood(totals[-1:], sizes[-1:])
        )
    usable = (cells > 0) & (cells < all_cells) & (inside > outside)
    gain = np.where(usable, gain, -np.inf)
    i, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
    if not np.isfinite(gain[i, j]):
        return None
    p_in, p_out = float(inside[i, j]), float(outside[i, j])
    start, stop = _sharpen(bad.mean(axis=0), (p_in + p_out) / 2)
    spread = _overdispersion(np.delete(bad.sum(axis=0), slice(start, stop)), routers)
    surprise = float(gain[i, j]) / spread
    large = surprise > _EVIDENCE and p_in - p_out > 0.2
    steep = surprise > _STRONG_EVIDENCE and p_in > _STEEP * p_out
    return (start, stop) if large or steep else None


def _overdispersion(disagree: npt.NDArray[np.int64], routers: int) -> float:
    """How many times more the disagreements of a token vary than those of independent routers; at least 1."""
    if len(disagree) <= 8:
        return 1.0
    rate = disagree.mean() / routers
    expected = routers * rate * (1 - rate)
    return max(1.0, float(disagree.var() / expected)) if expected else 1.0


def _sharpen(share: npt.NDArray[np.float64], threshold: float) -> tuple[int, int]:
    """The exact ends: the run of rows with the largest sum above the threshold (Kadane's algorithm)."""
    best = current = 0.0
    start = stop = left = 0
    for row, value in enumerate(share - threshold):
        if current <= 0:
            current, left = 0.0, row
        current += float(value)
        if current > best:
            best, start, stop = current, left, row + 1
    return start, max(stop, start + 1)


def _log_likelihood(hits: npt.NDArray[np.float64], cells: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    rate = np.clip(hits / cells, 1e-12, 1 - 1e-12)
    return np.asarray(hits * np.log(rate) + (cells - hits) * np.log1p(-rate))
