"""Can a router have made these routes? Plain predicates on arrays of expert ids; no model, no server.

Each takes expert ids whose last axis is top-k: `[rows, layers, top_k]` or `[rows, top_k]`, any whole-number
dtype. None changes or copies the routes of the caller's array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Routes = npt.NDArray[np.integer[Any]]
Flags = npt.NDArray[np.bool_]

# A run of equal rows is stuck when so many would come about by chance once in a million sequences.
_CHANCE = 1e-6
_MIN_REPEATS = 3


def all_zero(routes: Routes) -> Flags:
    """Where every slot is expert 0, bool of the shape without its last axis.

    A router picks distinct experts, so with top-2 and more no router makes such a row; it is what a buffer
    holds that was never written. With top-1 it may be real: judge it by how many there are.
    """
    return np.asarray(~routes.any(axis=-1))


def out_of_range(routes: Routes, num_experts: int) -> Flags:
    """Where an id lies outside 0..num_experts-1, bool of the shape without its last axis."""
    return np.asarray(((routes < 0) | (routes >= num_experts)).any(axis=-1))


def repeated_experts(routes: Routes) -> Flags:
    """Where an expert stands twice in a row, bool of the shape without its last axis; all-zero rows too."""
    ordered = np.sort(routes, axis=-1)
    return np.asarray((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))


def same_experts(a: Routes, b: Routes) -> Flags:
    """Where two arrays of one shape hold the same set of experts, in any order; shape without the last axis."""
    return np.asarray((np.sort(a, axis=-1) == np.sort(b, axis=-1)).all(axis=-1))


def stuck_rows(
    routes: Routes, token_ids: Sequence[int], *, zeros_too: bool = False
) -> tuple[int, int] | None:
    """The longest run of rows that hold one and the same routes in all layers while the tokens change.

    Neighbouring tokens share their routes now and then, more often in a model with few experts. So a run
    counts only where, by how often neighbours agree outside of it, chance would not make it.

    Args:
        routes: `[rows, layers, top_k]`, MoE layers only: a dense layer's zeros never change.
        token_ids: the token of each row, at least `rows` of them.
        zeros_too: whether rows that are all zero count as well, as with top-1, where they may be real.

    Returns:
        first and last row of the run, or None.
    """
    flat = routes.reshape(len(routes), math.prod(routes.shape[1:]))
    still = (flat[1:] == flat[:-1]).all(axis=1) & (flat[1:].any(axis=1) | zeros_too)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], still.astype(np.int8), [0]])))
    if not len(edges):
        return None
    starts, stops = edges[::2], edges[1::2]
    best = int(np.argmax(stops - starts))
    start, stop = int(starts[best]), int(stops[best])
    outside = len(still) - (stop - start)
    # One more of each kind, so that the rate is never 0 or 1.
    rate = (still.sum() - (stop - start) + 1) / (outside + 2)
    unlikely = (stop - start) * np.log(rate) < np.log(_CHANCE / len(routes))
    changes = len(set(token_ids[start : stop + 1])) > 1
    return (start, stop) if stop - start >= _MIN_REPEATS and changes and unlikely else None
