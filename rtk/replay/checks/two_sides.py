"""Two sides of the same routers, made comparable: what a shard has, and the routes it should have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.integer[Any]]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Order:
    """Another order in which the same tokens could have been laid out.

    Attributes:
        fault: the fault's name if this is the order that was used.
        sentence: what was done.
        change: what to change.
        token: int64 `[rows]`, the token whose routes stand in each row; -1 for none.
    """

    fault: str
    sentence: str
    change: str
    token: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Sides:
    """What is compared.

    Attributes:
        layer_numbers: Megatron layer numbers of the shard's routers.
        observed: one array `[rows, top_k]` a router: the tensors that a trainer installs, or what its routers
            recorded.
        layers: routes of all MoE layers of the model by layer number, each `[tokens, top_k]`, the tokens of all
            sequences one after the other.
        token: int64 `[rows]`, the token that each row should hold; -1 for padding.
        sample: int64 `[tokens]`, the sequence that each token belongs to.
        prompt: bool `[tokens]`, True for tokens of the prompt.
        orders: other layouts of the same tokens that are worth a try.
        others: routes of other microbatches or steps, in the form of `layers`, under a name to call them by.
        mtp: those of layer_numbers that are MTP layers, which count on from the backbone's last layer.
        dense: numbers of the model's dense layers, whose routes are zeros.
        exact: True where both sides are copies of the same routes, so that no router may differ; False where
            two engines chose for themselves.
    """

    layer_numbers: tuple[int, ...]
    observed: tuple[Ids, ...]
    layers: Mapping[int, Ids]
    token: npt.NDArray[np.int64]
    sample: npt.NDArray[np.int64]
    prompt: npt.NDArray[np.bool_]
    orders: Sequence[Order] = ()
    others: Mapping[str, Mapping[int, Ids]] = field(default_factory=dict)
    mtp: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    exact: bool = False

    @cached_property
    def observed_keys(self) -> Keys:
        """uint64 `[routers, rows]`."""
        table = [keys(ids) for ids in self.observed]
        return np.stack(table) if table else np.zeros((0, len(self.token)), np.uint64)

    @cached_property
    def layer_keys(self) -> dict[int, Keys]:
        """uint64 `[tokens]` by layer number."""
        return {number: keys(ids) for number, ids in self.layers.items()}

    @cached_property
    def same(self) -> npt.NDArray[np.bool_]:
        """bool `[routers, rows]`: the same set of experts on both sides; False for padding."""
        return self.matches(self.token)

    @cached_property
    def compared(self) -> npt.NDArray[np.bool_]:
        """bool `[rows]`: not padding."""
        return np.asarray(self.token >= 0)

    @cached_property
    def there(self) -> npt.NDArray[np.int64]:
        """int64 `[rows]`: `token`, with 0 in the place of -1, so that it can be indexed with."""
        return np.where(self.compared, self.token, 0)

    def matches(
        self, token: npt.NDArray[np.int64], numbers: Sequence[int] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which routers agree if row r held the routes of token[r] and router i those of layer numbers[i]."""
        numbers = self.layer_numbers if numbers is None else numbers
        valid = token >= 0
        there = np.where(valid, token, 0)
        same = np.zeros((len(numbers), len(token)), bool)
        for i, number in enumerate(numbers):
            if number in self.layer_keys and len(self.sample):
                same[i] = (self.observed_keys[i] == self.layer_keys[number][there]) & valid
        return same

    def chance(self, rows: npt.NDArray[np.bool_], routers: npt.NDArray[np.bool_]) -> float:
        """How often unrelated tokens would agree: the product of how often each set of experts is chosen."""
        shares = []
        for i in np.flatnonzero(routers):
            number = self.layer_numbers[i]
            if number in self.layer_keys:
                shares.append(_coincidence(self.observed_keys[i][rows], self.layer_keys[number]))
        return float(np.mean(shares)) if shares else 0.0


def keys(ids: Ids) -> Keys:
    """One number a row, equal for equal sets of experts (up to a 2^-64 accident).

    Args:
        ids: `[rows, top_k]`.
    """
    ordered = np.sort(np.asarray(ids).astype(np.int64), axis=-1).astype(np.uint64)
    total = np.zeros(ordered.shape[:-1], np.uint64)
    for slot in range(ordered.shape[-1]):  # FNV-like: one odd multiplier, wrapping at 2^64
        total = (total ^ (ordered[..., slot] + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0x100000001B3)
        total ^= total >> np.uint64(29)
    return total


def _coincidence(a: Keys, b: Keys) -> float:
    if not len(a) or not len(b):
        return 0.0
    values_a, counts_a = np.unique(a, return_counts=True)
    values_b, counts_b = np.unique(b, return_counts=True)
    _, in_a, in_b = np.intersect1d(values_a, values_b, assume_unique=True, return_indices=True)
    return float((counts_a[in_a] / len(a)) @ (counts_b[in_b] / len(b)))
