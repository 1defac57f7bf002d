"""Whether two sides use other ids for the same experts, found from which ids occur together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rtk.replay.checks.two_sides import Ids

# An id that occurs once is matched by accident to any of the top-k ids beside it.
_SUPPORT = 2
# More than any model has experts, copies included; a table of all pairs of ids has to fit into memory.
_MAX_IDS = 4096


@dataclass(frozen=True)
class Relabelling:
    """How well the best relabelling of one layer does on tokens that it was not found from.

    Attributes:
        before: share of ids that are in the other side's row as they are.
        after: the same after relabelling.
        chance: the same if every id were taken for the other side's most frequent expert.
        moved: how many ids stand for another id.
    """

    before: float
    after: float
    chance: float
    moved: int


def relabelling(observed: Ids, expected: Ids) -> Relabelling | None:
    """Fit a map of ids on every other row, and measure it on the rest, both ways round.

    Each id is mapped to the id with which it occurs most often for how often the two occur (cosine of
    their columns of zeros and ones). Since a map of hundreds of ids fits any few rows, only held-out rows count,
    and only ids that were seen at least twice. Two ids may map to one: a load balancer keeps redundant copies.

    Args:
        observed, expected: `[rows, top_k]`.

    Returns:
        the better direction (physical ids may be on either side); None where fewer than half of the held-out
        ids were seen often enough, or some are no expert's at all.
    """
    if any(ids.size and (ids.min() < 0 or ids.max() >= _MAX_IDS) for ids in (observed, expected)):
        return None
    directions = [_held_out(observed, expected), _held_out(expected, observed)]
    fits = [fit for fit in directions if fit is not None]
    return max(fits, key=lambda fit: fit.after) if fits else None


def _held_out(source: Ids, target: Ids) -> Relabelling | None:
    halves = np.arange(len(source)) % 2 == 0
    befores, afters, chances, moved, seen = [], [], [], 0, []
    for fit_rows in (halves, ~halves):
        table = _together(source[fit_rows], target[fit_rows])
        if not table.size:
            return None
        often = np.bincount(source[fit_rows].ravel(), minlength=table.shape[0]) >= _SUPPORT
        mapped = table.argmax(axis=1)
        mapped[~often] = -1
        rest, truth = source[~fit_rows], target[~fit_rows]
        within = rest < len(mapped)
        image = np.where(within, mapped[np.where(within, rest, 0)], -1)
        usable = image >= 0
        seen.append(float(usable.mean()) if usable.size else 0.0)
        if not usable.any():
            return None
        befores.append((rest[:, :, None] == truth[:, None, :]).any(axis=2)[usable].mean())
        afters.append((image[:, :, None] == truth[:, None, :]).any(axis=2)[usable].mean())
        chances.append(np.bincount(truth.ravel()).max() / len(truth))
        moved = max(moved, int((often & (mapped != np.arange(len(mapped)))).sum()))
    if min(seen) < 0.5:
        return None
    return Relabelling(float(np.mean(befores)), float(np.mean(afters)), float(np.mean(chances)), moved)


def _together(source: Ids, target: Ids) -> npt.NDArray[np.float64]:
    """Cosine similarity `[source ids, target ids]` of which rows each id occurs in."""
    if not source.size or not target.size:
        return np.zeros((0, 0))
    a, b = source.astype(np.int64), target.astype(np.int64)
    shape = int(a.max()) + 1, int(b.max()) + 1
    pairs = a[:, :, None] * shape[1] + b[:, None, :]
    counts = np.bincount(pairs.ravel(), minlength=shape[0] * shape[1]).reshape(shape).astype(float)
    norms = np.sqrt(
        np.outer(np.bincount(a.ravel(), minlength=shape[0]), np.bincount(b.ravel(), minlength=shape[1]))
    )
    return np.asarray(counts / np.maximum(norms, 1))
