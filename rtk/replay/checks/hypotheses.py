"""Each thing that could explain a disagreement, tried by the agreement that it would give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from rtk.replay.checks.evidence import Trial, some
from rtk.replay.checks.renamed_experts import relabelling
from rtk.replay.checks.report import Hypothesis
from rtk.replay.checks.shifted_rows import shifted_tokens
from rtk.replay.checks.two_sides import Keys, keys


def tried(trial: Trial) -> Iterator[Hypothesis]:
    """All hypotheses that can be tried in a region, the most specific first."""
    yield from _other_orders(trial)
    yield from shifted_tokens(trial)
    yield from _shifted_layers(trial)
    yield from _other_steps(trial)
    yield from _wrapped(trial)
    yield from _stuck(trial)
    yield from _relabelled(trial)


def _other_orders(trial: Trial) -> Iterator[Hypothesis]:
    for order in trial.sides.orders:
        same, there = trial.sides.matches(order.token), order.token >= 0
        shares = trial.shares(same, there)
        if trial.sides.exact and there.any():
            # Copies also stand where the right order has padding; there may be no other row to compare.
            everywhere = float(same[trial.region.routers][:, there].mean())
            after = min(everywhere, shares[1]) if shares[2] else everywhere
            shares = trial.region.agreement, after, int(there.sum())
        tries = math.log(len(trial.sides.orders))
        # Where another order has padding, copies hold padding, which is like no token's routes.
        exact = trial.sides.exact
        yield trial.judged(
            order.fault, order.sentence, order.change, shares, log_tries=tries, accounts_for_all=exact
        )


def _shifted_layers(trial: Trial) -> Iterator[Hypothesis]:
    """Routers that hold the routes of another layer."""
    sides, region = trial.sides, trial.region
    pool = sorted(sides.layers)
    table = np.full((len(sides.layer_numbers), len(pool)), -1.0)
    rows = some(np.flatnonzero(trial.rows), 2048)
    if not len(rows) or len(pool) < 2:
        return
    there = sides.token[rows]
    for i in np.flatnonzero(region.routers):
        for j, number in enumerate(pool):
            table[i, j] = (sides.layer_keys[number][there] == sides.observed_keys[i][rows]).mean()
    best = table.argmax(axis=1)
    numbers = list(sides.layer_numbers)
    for i in np.flatnonzero(region.routers):
        numbers[i] = pool[best[i]]
    same = sides.matches(sides.token, numbers)
    others = Counter(b - a for a, b in zip(sides.layer_numbers, numbers, strict=True) if a != b)
    for i in np.flatnonzero(region.routers) if sides.exact and others else []:
        # A dense layer's zeros are those of any dense layer, so they count only beside routers that are moved alike.
        from_dense = sides.layer_numbers[i] + others.most_common(1)[0][0]
        if from_dense in sides.dense and not sides.observed[i][trial.rows].any():
            numbers[i], same[i] = from_dense, sides.compared
    moved = [(a, b) for a, b in zip(sides.layer_numbers, numbers, strict=True) if a != b]
    if not moved:
        return
    listed = ", ".join(f"layer {a} has the routes of layer {b}" for a, b in moved[:4])
    more = "" if len(moved) <= 4 else f" and {len(moved) - 4} more"
    by_number = Counter(b - a for a, b in moved)
    by_place = Counter(pool.index(b) - pool.index(a) for a, b in moved if a in pool and b in pool)
    if by_number.most_common(1)[0][1] * 2 > len(moved):
        way = f"the list of tensors is shifted by {by_number.most_common(1)[0][0]:+d} layers"
    elif by_place and by_place.most_common(1)[0][1] * 2 > len(moved):
        way = f"the list of tensors is shifted by {by_place.most_common(1)[0][0]:+d} MoE layers"
    else:
        way = "the layers are in another order"
    if all(a in sides.mtp for a, _ in moved):
        fault, way = "MTP layers", "MTP layers were taken for layers of the backbone"
        change = "give MTP routers routes of their own, or none"
    else:
        fault = "shifted layers"
        change = "find each router's routes by its own global layer number, not by an offset that counts dense layers too"
    shares = trial.shares(same)
    tries = len(moved) * math.log(len(pool))
    yield trial.judged(fault, f"{listed}{more}: {way}", change, shares, log_tries=tries)


def _other_steps(trial: Trial) -> Iterator[Hypothesis]:
    """Rows that hold the routes of another microbatch, row by row."""
    sides = trial.sides
    for name, layers in sides.others.items():
        known = {number: keys(ids) for number, ids in layers.items()}
        same = np.zeros_like(sides.same)
        valid = np.zeros(len(sides.compared), bool)
        for i, number in enumerate(sides.layer_numbers):
            if number in known:
                shared = min(len(known[number]), len(valid))
                same[i, :shared] = known[number][:shared] == sides.observed_keys[i][:shared]
                valid[:shared] = True
        yield trial.judged(
            "stale replay queue",
            f"the routes are those of {name}",
            "clear each RouterReplay's backward list after forward-only schedules and between steps",
            trial.shares(same, valid),
            log_tries=math.log(len(sides.others)),
        )


def _wrapped(trial: Trial) -> Iterator[Hypothesis]:
    """Ids that went through a uint8 on one side."""
    sides = trial.sides
    top = max(int(ids.max(initial=0)) for ids in [*sides.observed, *sides.layers.values()])
    if top < 256:
        return
    same = np.zeros_like(sides.same)
    for i, number in enumerate(sides.layer_numbers):
        if number in sides.layers:
            ours, theirs = sides.observed[i], sides.layers[number][sides.there]
            # A bit mask, since NumPy takes no 256 beside ids that came as uint8.
            same[i] = (keys(ours & 255) == keys(theirs & 255)) & sides.compared
    one_sided = max(int(ids.max(initial=0)) for ids in sides.observed) < 256 or (
        max(int(ids.max(initial=0)) for ids in sides.layers.values()) < 256
    )
    verdict = trial.judged(
        "wrapped ids",
        "ids of one side are those of the other modulo 256",
        "keep ids of more than 256 experts in uint16 or wider",
        trial.shares(same),
        log_tries=0.0,
    )
    if one_sided:
        yield verdict


def _stuck(trial: Trial) -> Iterator[Hypothesis]:
    """One row that one side repeats over contiguous tokens."""
    sides = trial.sides
    ours, theirs = [], []
    for i in np.flatnonzero(trial.region.routers):
        number = sides.layer_numbers[i]
        if number in sides.layer_keys:
            ours.append(_commonest(sides.observed_keys[i][trial.rows]))
            theirs.append(_commonest(sides.layer_keys[number][sides.there][trial.rows]))
    if not ours:
        return
    moving, stuck = sorted([float(np.mean(theirs)), float(np.mean(ours))])
    yield trial.judged(
        "stale rows",
        "one row is repeated over all of these tokens, on one side only",
        "have the server clear its capture buffer for padded rows, and drop rows of tokens that it did not forward",
        (trial.region.agreement, stuck, int(trial.rows.sum())),
        log_tries=math.log(2),
        chance=max(moving, trial.chance),
    )


def _commonest(row_keys: Keys) -> float:
    return float(np.unique(row_keys, return_counts=True)[1].max() / len(row_keys)) if len(row_keys) else 0.0


def _relabelled(trial: Trial) -> Iterator[Hypothesis]:
    """Experts under other ids, layer by layer: a load balancer's physical experts."""
    sides, befores, afters, chances, known = trial.sides, [], [], [], []
    for i in np.flatnonzero(trial.region.routers):
        number = sides.layer_numbers[i]
        if number in sides.layers:
            fit = relabelling(sides.observed[i][trial.rows], sides.layers[number][sides.there][trial.rows])
            if fit is not None:
                befores.append(fit.before)
                afters.append(fit.after)
                chances.append(fit.chance)
                known.append(fit.moved)
    if not afters:
        yield Hypothesis(
            "physical experts",
            "ids may stand for other experts, but too few tokens use each id for that to be told",
            "compare more tokens",
            trial.region.agreement,
            trial.region.agreement,
            explains=False,
        )
    if not any(known):
        return
    yield trial.judged(
        "physical experts",
        f"the ids of {sum(known)} experts in {len(afters)} layers stand for other experts, layer by layer",
        "map physical experts back to logical ones (EPLB) before routes leave the server",
        (float(np.mean(befores)), float(np.mean(afters)), int(trial.rows.sum())),
        log_tries=0.0,
        chance=float(np.mean(chances)),
    )
