"""Explanations on hand-made routes: each hypothesis set up in a few lines, and what must not be explained."""

import dataclasses

import numpy as np
import pytest

from rtk.replay.checks.diagnosis import diagnose
from rtk.replay.checks.renamed_experts import relabelling
from rtk.replay.checks.two_sides import Order, Sides, keys

ROWS, LAYERS, EXPERTS, TOP_K = 120, (2, 3, 5, 6), 32, 3


def routes(rng, rows=ROWS):
    return np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K]


def noisy(rng, ids, share):
    """A share of rows loses one expert to another one."""
    ids = ids.copy()
    for row in np.flatnonzero(rng.random(len(ids)) < share):
        ids[row, -1] = rng.choice(np.setdiff1d(np.arange(EXPERTS), ids[row]))
    return ids


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def right(rng) -> Sides:
    """Two sequences of 70 and 50 tokens on routers of two layers out of four; 4 % of routers differ."""
    layers = {number: routes(rng) for number in LAYERS}
    observed = tuple(noisy(rng, layers[number], 0.04) for number in (3, 5))
    return Sides(
        (3, 5), observed, layers, np.arange(ROWS), np.repeat([0, 1], [70, 50]), np.arange(ROWS) % 70 < 20
    )


def wrong(right: Sides, change) -> Sides:
    return dataclasses.replace(right, observed=tuple(change(ids) for ids in right.observed))


def test_keys_are_those_of_sets(rng):
    ids = routes(rng, 500)
    sets = [frozenset(row) for row in ids.tolist()]
    assert np.array_equal(keys(ids), keys(ids[:, ::-1]))
    assert len(set(keys(ids).tolist())) == len(set(sets))


def test_natural_disagreement_is_no_fault(right):
    assert 0.9 < right.same.mean() < 1
    assert diagnose(right) is None


def test_exact_copies_may_not_differ_at_all(right):
    found = diagnose(dataclasses.replace(right, exact=True))
    assert found is not None
    assert not found.hypotheses[0].explains


@pytest.mark.parametrize(
    ("shift", "fault"),
    [(1, "off by one"), (-1, "off by one"), (7, "shifted tokens"), (-20, "shifted tokens")],
)
def test_shifted_tokens(right, shift, fault):
    found = diagnose(
        wrong(right, lambda ids: np.concatenate([np.roll(ids[:70], -shift, 0), np.roll(ids[70:], -shift, 0)]))
    )
    assert found.hypotheses[0].fault == fault
    assert found.hypotheses[0].explains
    assert f"token {abs(shift)} {'later' if shift > 0 else 'earlier'}" in found.hypotheses[0].sentence
    assert found.hypotheses[0].before < 0.2
    assert found.hypotheses[0].after > 0.9


def test_each_sequence_shifted_by_its_own(right):
    def change(ids):
        return np.concatenate([np.roll(ids[:70], 3, 0), np.roll(ids[70:], -5, 0)])

    best = diagnose(wrong(right, change)).hypotheses[0]
    assert best.explains
    assert "sequence 0: -3, sequence 1: +5" in best.sentence


def test_layers_of_another_place(right):
    sides = dataclasses.replace(right, observed=(right.layers[5], right.layers[6]))
    best = diagnose(sides).hypotheses[0]
    assert (best.fault, best.explains) == ("shifted layers", True)
    assert "layer 3 has the routes of layer 5, layer 5 has the routes of layer 6" in best.sentence
    assert "+1 MoE layers" in best.sentence


def test_a_permutation_of_each_layers_experts(right, rng):
    best = diagnose(wrong(right, lambda ids: rng.permutation(EXPERTS)[ids])).hypotheses[0]
    assert (best.fault, best.explains) == ("physical experts", True)
    assert best.after > 0.85


def test_random_routes_are_not_taken_for_a_permutation(rng):
    """Any few rows fit some map; what counts are the rows that it was not found from."""
    for rows in (40, 200, 1000):
        fit = relabelling(routes(rng, rows), routes(rng, rows))
        assert fit is None or fit.after < 0.35


def test_one_logical_expert_with_two_copies(rng):
    logical = routes(rng, 600)
    physical = np.where((logical < 8) & (rng.random(logical.shape) < 0.5), logical + EXPERTS, logical)
    for a, b in ((logical, physical), (physical, logical)):
        assert relabelling(a, b).after > 0.98


def test_another_order_of_the_tokens(right, rng):
    order = rng.permutation(ROWS)
    sides = dataclasses.replace(
        wrong(right, lambda ids: ids[order]),
        orders=(
            Order("context-parallel order", "cut otherwise", "cut so", order),
            Order("padding side", "no", "no", order[::-1]),
        ),
    )
    best = diagnose(sides).hypotheses[0]
    assert (best.fault, best.explains) == ("context-parallel order", True)


def test_ids_that_wrapped(right):
    wide = {number: ids * 16 for number, ids in right.layers.items()}  # ids to 496
    observed = tuple((ids * 16) % 256 for ids in right.observed)
    best = diagnose(dataclasses.replace(right, layers=wide, observed=observed)).hypotheses[0]
    assert (best.fault, best.explains) == ("wrapped ids", True)


def test_a_row_that_stands_still(right):
    def change(ids):
        ids = ids.copy()
        ids[40:90] = ids[39]
        return ids

    found = diagnose(wrong(right, change))
    assert (found.hypotheses[0].fault, found.hypotheses[0].explains) == ("stale rows", True)
    assert (abs(found.start - 40) <= 2, abs(found.stop - 90) <= 2) == (True, True)
    assert found.part


def test_routes_of_another_step(right, rng):
    other = {number: routes(rng) for number in LAYERS}
    sides = dataclasses.replace(
        right, observed=(other[3], other[5]), others={"step 41": other, "step 40": right.layers}
    )
    best = diagnose(sides).hypotheses[0]
    assert (best.fault, best.explains) == ("stale replay queue", True)
    assert "step 41" in best.sentence


def test_a_span_under_other_weights(right, rng):
    def change(ids):
        return np.concatenate([ids[:60], noisy(rng, ids[60:95], 0.6), ids[95:]])

    found = diagnose(wrong(right, change))
    assert (found.hypotheses[0].fault, found.hypotheses[0].explains) == ("other weights", True)
    assert abs(found.start - 60) <= 5
    assert abs(found.stop - 95) <= 5
    assert set(found.layer_numbers) == {3, 5}


def test_unrelated_routes_are_explained_by_nothing(right, rng):
    """Over many draws: none of a thousand shifts, maps and orders may explain noise."""
    for draw in range(30):
        rows = int(rng.choice([8, 30, ROWS]))
        sides = Sides(
            (3, 5), (routes(rng, rows), routes(rng, rows)), {n: routes(rng, rows) for n in LAYERS},
            np.arange(rows), np.zeros(rows, int), np.arange(rows) < 4,
        )  # fmt: skip
        found = diagnose(sides)
        assert found is not None
        assert not any(h.explains for h in found.hypotheses), (draw, found.hypotheses[0])


def test_a_span_of_unrelated_routes_is_not_called_other_weights(right, rng):
    def change(ids):
        return np.concatenate([ids[:60], routes(rng, 35), ids[95:]])

    found = diagnose(wrong(right, change))
    assert abs(found.start - 60) <= 2
    assert not any(h.explains for h in found.hypotheses)


def test_nothing_to_compare(right):
    padding = dataclasses.replace(right, token=np.full(ROWS, -1))
    assert diagnose(padding) is None
    assert diagnose(dataclasses.replace(right, layer_numbers=(), observed=())) is None


def test_what_holds_for_a_third_of_the_tokens_explains_nothing(right, rng):
    """Far more than chance, and still no explanation of the rest."""

    def change(ids):
        moved, third = np.roll(ids, -5, 0), rng.random(ROWS) < 0.35
        return np.where(third[:, None], moved, routes(rng))

    found = diagnose(wrong(right, change))
    assert max(h.after for h in found.hypotheses if h.fault == "shifted tokens") > 0.25
    assert not any(h.explains for h in found.hypotheses)
