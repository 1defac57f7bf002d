"""Where two sides of a shard's routers disagree, and which fault explains it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rtk.replay.checks import disagreement, hypotheses
from rtk.replay.checks.evidence import Trial
from rtk.replay.checks.report import Hypothesis
from rtk.replay.checks.two_sides import Sides

# A specific layout wins over a search among a thousand shifts that does about as well.
_TIE = 0.06


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        agreement: share of routers that agree where it goes wrong.
        layer_numbers: the layers that go wrong.
        start, stop: the rows that go wrong, half open.
        first: layer number and row of the first cell that goes wrong.
        part: whether other rows are right.
        hypotheses: what was tried, best first.
    """

    agreement: float
    layer_numbers: tuple[int, ...]
    start: int
    stop: int
    first: tuple[int, int]
    part: bool
    hypotheses: tuple[Hypothesis, ...]


def diagnose(sides: Sides, *, min_agreement: float = disagreement.MIN_AGREEMENT) -> Diagnosis | None:
    """Find the region that disagrees more than it should, and try to explain it.

    Args:
        sides: what is compared.
        min_agreement: agreement of a layer, or of a span, below which it is too low; not used where the sides
            are exact copies.

    Returns:
        None where nothing is wrong. Hypotheses that explain nothing are kept, to show what was ruled out.
    """
    region = disagreement.find(sides, min_agreement=min_agreement)
    if region is None:
        return None
    trial = Trial(sides, region)
    tried = list(hypotheses.tried(trial))
    rest = sides.compared.copy()
    rest[region.start : region.stop] = False
    part = bool(rest.any())
    if not any(h.explains for h in tried) and not sides.exact:
        tried += _by_place(trial, part)
    top = max((h.after for h in tried if h.explains), default=1.0)
    order = sorted(
        range(len(tried)),
        key=lambda i: (
            not tried[i].explains,
            tried[i].after < top - _TIE,
            0 if tried[i].explains else -tried[i].after,
            i,
        ),
    )
    numbers = tuple(n for n, inside in zip(sides.layer_numbers, region.routers, strict=True) if inside)
    return Diagnosis(
        region.agreement, numbers, region.start, region.stop, _first(sides, region), part,
        tuple(tried[i] for i in order),
    )  # fmt: skip


def _first(sides: Sides, region: disagreement.Region) -> tuple[int, int]:
    """The first row that goes wrong in the region, in the first layer that does there."""
    bad = (~sides.same & sides.compared)[:, region.start : region.stop]
    bad[~region.routers] = False
    router = int(np.argmax(bad.any(axis=1)))
    return sides.layer_numbers[router], region.start + int(np.argmax(bad[router]))


def _by_place(trial: Trial, part: bool) -> list[Hypothesis]:
    """A fault that is known by its place alone: a span that half agrees, in every layer, beside one that agrees."""
    if not part:
        return []
    sides, region = trial.sides, trial.region
    kappa = (region.agreement - trial.chance) / max(1 - trial.chance, 1e-6)
    outside = float(sides.same[:, sides.compared & ~trial.rows].mean())
    explains = kappa >= 0.1
    return [
        Hypothesis(
            "other weights",
            f"rows {region.start}..{region.stop - 1} agree in part ({region.agreement:.0%}), as routes of the same tokens "
            f"under other weights do, while the rest agrees to {outside:.0%}",
            "drop or sample again what was generated before a weight update, or tag each span with its weight version",
            region.agreement,
            outside,
            explains,
        )
    ]
