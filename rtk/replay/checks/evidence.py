"""What every hypothesis is measured against, and when one of them truly explains a disagreement."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rtk.replay.checks.disagreement import Region
from rtk.replay.checks.report import Hypothesis
from rtk.replay.checks.two_sides import Sides


class Trial:
    """A region of the table of routers by rows, and how much of it a hypothesis sets right.

    Attributes:
        sides, region: what is compared, and where it disagrees.
        rows: bool `[rows]`, the region's rows that are not padding.
        chance: how often unrelated tokens would agree there.
    """

    def __init__(self, sides: Sides, region: Region) -> None:
        self.sides, self.region = sides, region
        self.rows = np.zeros(len(sides.compared), bool)
        self.rows[region.start : region.stop] = True
        self.rows &= sides.compared
        self.chance = sides.chance(self.rows, region.routers)

    def shares(
        self, same: npt.NDArray[np.bool_], valid: npt.NDArray[np.bool_] | None = None
    ) -> tuple[float, float, int]:
        """Agreement before, agreement after, and rows compared, on the rows of the region that `valid` leaves."""
        rows = self.rows if valid is None else self.rows & valid
        before = self.sides.same[self.region.routers][:, rows]
        after = same[self.region.routers][:, rows]
        return (float(before.mean()), float(after.mean()), int(rows.sum())) if rows.any() else (0.0, 0.0, 0)

    def judged(
        self,
        fault: str,
        sentence: str,
        change: str,
        shares: tuple[float, float, int],
        *,
        log_tries: float,
        chance: float | None = None,
        accounts_for_all: bool = False,
    ) -> Hypothesis:
        """The hypothesis with its verdict.

        Args:
            fault, sentence, change: as in Hypothesis.
            shares: agreement before and after, and the rows that were compared.
            log_tries: natural log of how many alternatives were tried to find it.
            chance: how often unrelated tokens would agree; the region's own where left out.
            accounts_for_all: whether it also says what stands in the rows that could not be compared.
        """
        before, after, rows = shares
        if rows * 2 < self.rows.sum() and not accounts_for_all:
            # It speaks of less than half of what is to be explained.
            return Hypothesis(fault, sentence, change, before, after, explains=False)
        chance = self.chance if chance is None else chance
        return Hypothesis(
            fault, sentence, change, before, after, self._explains(before, after, rows, chance, log_tries)
        )

    def _explains(self, before: float, after: float, rows: int, chance: float, log_tries: float) -> bool:
        chance = min(max(chance, 1e-6), 1 - 1e-6)
        # Chernoff's bound on so many agreements of unrelated tokens, over all that was tried. Layers of one
        # token are not independent, so a token counts for at most four.
        cells = rows * min(int(self.region.routers.sum()), 4)
        surprise = cells * _divergence(after, chance) if after > chance else 0.0
        if surprise <= log_tries + math.log(1000):
            return False
        if self.sides.exact:
            return after >= 0.95 and after > before
        kappa = (after - chance) / (1 - chance)  # Cohen's kappa: agreement beyond chance
        gain = (after - before) / (1 - chance)
        return kappa >= 0.5 and gain >= 0.25


def some(values: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """At most so many, evenly spread."""
    return (
        values[np.unique(np.linspace(0, len(values) - 1, most).astype(int))] if len(values) > most else values
    )


def _divergence(a: float, c: float) -> float:
    a = min(max(a, 1e-9), 1 - 1e-9)
    return a * math.log(a / c) + (1 - a) * math.log((1 - a) / (1 - c))
