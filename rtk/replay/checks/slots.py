"""Slots of a router's rows that no router fills like that: the same id in every row, or a sentinel."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# So many rows of different tokens do not share an expert in one and the same slot by accident.
_ENOUGH_ROWS = 8
_ENOUGH_FOR_ONE_SLOT = 32


def constant(ids: npt.NDArray[np.integer[Any]]) -> dict[int, int]:
    """Slots that hold one id in every row, and that id; empty where there are too few rows to say.

    Args:
        ids: `[rows, top_k]`, rows of tokens only.
    """
    if len(ids) < _ENOUGH_ROWS:
        return {}
    return {int(slot): int(ids[0, slot]) for slot in np.flatnonzero((ids == ids[0]).all(axis=0))}


def cut_from(ids: npt.NDArray[np.integer[Any]]) -> int | None:
    """The slot from which on every row holds 0, where the slots before it hold experts; None if there is none.

    A single slot has no repeat to give it away, so it takes more rows.

    Args:
        ids: `[rows, top_k]`, rows of tokens only.
    """
    zero = constant(ids)
    slot: int = ids.shape[1]
    while slot and zero.get(slot - 1) == 0:
        slot -= 1
    empty = ids.shape[1] - slot
    if not slot or not empty or (empty == 1 and len(ids) < _ENOUGH_FOR_ONE_SLOT):
        return None
    return slot


def sentinel(ids: npt.NDArray[np.integer[Any]], num_experts: int) -> int | None:
    """The one value outside the experts that marks slots as never written; None if there is none.

    A negative value is no id of any kind. One past the experts could be a physical id, unless a row holds it
    twice: physical ids of a row are distinct as well.

    Args:
        ids: `[rows, top_k]`.
        num_experts: ids of experts are below it.
    """
    outside = (ids < 0) | (ids >= num_experts)
    values = np.unique(ids[outside])
    if len(values) != 1:
        return None
    value = int(values[0])
    twice = bool((outside.sum(axis=1) > 1).any())
    return value if value < 0 or twice else None
