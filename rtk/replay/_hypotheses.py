"""Each thing that could explain a disagreement, tried by the agreement that it would give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rtk.replay._permutation import relabelling
from rtk.replay._regions import Region
from rtk.replay._sides import Keys, Sides, keys
from rtk.replay.report import Hypothesis

# Shifts that are tried one by one, and the usual sizes of a prefill chunk beyond them.
_NEAR, _CHUNKS = 1024, (2048, 4096, 8192, 16384)
# Enough layers to tell one shift from another; the winner is then measured on all of them.
_PROBE_LAYERS = 8


def tried(sides: Sides, region: Region) -> Iterator[Hypothesis]:
    """All hypotheses that can be tried in a region, the most specific first."""
    trial = _Trial(sides, region)
    yield from _other_orders(trial)
    yield from _shifted_tokens(trial)
    yield from _shifted_layers(trial)
    yield from _other_steps(trial)
    yield from _wrapped(trial)
    yield from _stuck(trial)
    yield from _relabelled(trial)


class _Trial:
    """A region, with what every hypothesis is measured against."""

    def __init__(self, sides: Sides, region: Region) -> None:
        self.sides, self.region = sides, region
        self.rows = np.zeros(len(sides.compared), bool)
        self.rows[region.start : region.stop] = True
        self.rows &= sides.compared
        self.chance = sides.chance(self.rows, region.routers)
        self.numbers = [n for n, inside in zip(sides.layer_numbers, region.routers, strict=True) if inside]

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
    ) -> Hypothesis:
        before, after, rows = shares
        chance = self.chance if chance is None else chance
        return Hypothesis(
            fault, sentence, change, before, after, self._explains(before, after, rows, chance, log_tries)
        )

    def _explains(self, before: float, after: float, rows: int, chance: float, log_tries: float) -> bool:
        if rows * 2 < self.rows.sum():
            return False  # it speaks of less than half of what is to be explained
        if self.sides.exact:
            return after >= 0.95 and after > before
        chance = min(max(chance, 1e-6), 1 - 1e-6)
        # Chernoff's bound on so many agreements of unrelated tokens, over all that was tried. Layers of one
        # token are not independent, so a token counts for at most four.
        cells = rows * min(int(self.region.routers.sum()), 4)
        surprise = cells * _divergence(after, chance) if after > chance else 0.0
        kappa = (after - chance) / (1 - chance)  # Cohen's kappa: agreement beyond chance
        gain = (after - before) / (1 - chance)
        return kappa >= 0.5 and gain >= 0.25 and surprise > log_tries + math.log(1000)


def _divergence(a: float, c: float) -> float:
    a = min(max(a, 1e-9), 1 - 1e-9)
    return a * math.log(a / c) + (1 - a) * math.log((1 - a) / (1 - c))


def _other_orders(trial: _Trial) -> Iterator[Hypothesis]:
    for order in trial.sides.orders:
        same, there = trial.sides.matches(order.token), order.token >= 0
        shares = trial.shares(same, there)
        if trial.sides.exact and there.any():
            # Copies also stand where the right order has padding; there may be no other row to compare.
            everywhere = float(same[trial.region.routers][:, there].mean())
            after = min(everywhere, shares[1]) if shares[2] else everywhere
            shares = trial.region.agreement, after, int(there.sum())
        tries = math.log(len(trial.sides.orders))
        yield trial.judged(order.fault, order.sentence, order.change, shares, log_tries=tries)


def _shifted_tokens(trial: _Trial) -> Iterator[Hypothesis]:
    """Rows that hold the routes of a later or earlier token, all by as much or each sequence by its own."""
    sides, token = trial.sides, trial.sides.token
    rows = np.flatnonzero(trial.rows)
    if not len(rows) or not len(sides.sample):
        return
    longest = int(np.bincount(sides.sample).max())
    near = min(longest - 1, _NEAR)
    shifts = [k for k in range(-near, near + 1) if k]
    shifts += [s * k for k in _CHUNKS if near < k < longest for s in (-1, 1)]
    if not shifts:
        return
    shifts.sort(key=abs)
    probes = [i for i in np.flatnonzero(trial.region.routers) if sides.layer_numbers[i] in sides.layer_keys]
    probes = (
        [int(probes[j]) for j in np.unique(np.linspace(0, len(probes) - 1, _PROBE_LAYERS).astype(int))]
        if probes
        else []
    )
    samples = np.unique(sides.sample[token[rows]])
    hits = np.zeros((len(shifts), len(samples)))
    counts = np.zeros((len(shifts), len(samples)))
    home = np.searchsorted(samples, sides.sample[token[rows]])
    observed = [sides.observed_keys[i][rows] for i in probes]
    for number, shift in enumerate(shifts):
        moved = token[rows] + shift
        inside = (moved >= 0) & (moved < len(sides.sample))
        there = np.where(inside, moved, 0)
        inside &= sides.sample[there] == sides.sample[token[rows]]
        same = sum(
            (sides.layer_keys[sides.layer_numbers[i]][there] == own)
            for i, own in zip(probes, observed, strict=True)
        )
        hits[number] = np.bincount(home, weights=np.where(inside, same, 0), minlength=len(samples))
        counts[number] = np.bincount(home, weights=inside, minlength=len(samples))
    # A shift that leaves few rows to compare must not win by a handful of agreements.
    rate = hits / np.maximum(counts, 1) / max(len(probes), 1)
    sizes = np.bincount(home, minlength=len(samples))
    rate_all = hits.sum(axis=1) / np.maximum(counts.sum(axis=1), 1) / max(len(probes), 1)
    best = int(np.argmax(np.where(counts.sum(axis=1) * 2 >= len(rows), rate_all, -1)))
    yield _shift(trial, {int(s): shifts[best] for s in samples}, math.log(len(shifts)))
    if len(samples) > 1:
        own = np.argmax(np.where(counts * 2 >= sizes, rate, -1), axis=0)
        as_is = np.array([_agreement_of(trial, int(s), probes) for s in samples])
        each = {int(s): 0 if as_is[i] >= rate[own[i], i] else shifts[own[i]] for i, s in enumerate(samples)}
        if len(set(each.values())) > 1:
            yield _shift(trial, each, len(samples) * math.log(len(shifts)))


def _agreement_of(trial: _Trial, sample: int, probes: list[int]) -> float:
    token = trial.sides.token
    rows = trial.rows & (trial.sides.sample[np.maximum(token, 0)] == sample)
    return float(trial.sides.same[probes][:, rows].mean()) if rows.any() and probes else 0.0


def _shift(trial: _Trial, shifts: dict[int, int], log_tries: float) -> Hypothesis:
    """The hypothesis that rows of each sequence hold the routes of the token so many further on."""
    sides, token = trial.sides, trial.sides.token
    by_sample = np.zeros(int(sides.sample.max()) + 1, np.int64)
    for sample, shift in shifts.items():
        by_sample[sample] = shift
    valid = token >= 0
    sample = sides.sample[np.where(valid, token, 0)]
    moved = token + by_sample[sample]
    inside = valid & (moved >= 0) & (moved < len(sides.sample))
    inside &= sides.sample[np.where(inside, moved, 0)] == sample
    shares = trial.shares(sides.matches(np.where(inside, moved, -1)), inside)
    values = list(dict.fromkeys(shifts.values()))
    if len(values) == 1:
        shift = values[0]
        if abs(shift) == 1:
            fault = "off by one"
            change = "a sampled sequence has one row fewer than tokens: leave the gap at its last token, not its first"
        else:
            fault = "shifted tokens"
            change = "look for an offset into the sequence that one side counts and the other does not"
        side = "later" if shift > 0 else "earlier"
        sentence = f"each row has the routes of the token {abs(shift)} {side} in the trace"
        return trial.judged(fault, sentence, change, shares, log_tries=log_tries)
    listed = ", ".join(f"sequence {s}: {shifts[s]:+d}" for s in sorted(shifts)[:6])
    more = "" if len(shifts) <= 6 else f" and {len(shifts) - 6} more"
    steps = [shifts[s] for s in sorted(shifts)]
    # Padding before a sequence adds up from one sequence to the next.
    if steps[0] == 0 and steps in (sorted(steps), sorted(steps, reverse=True)):
        fault = "packing padding"
        change = "put routes where cu_seqlens_padded puts the tokens, and pad each sequence's routes as its tokens are padded"
    else:
        fault = "padding side"
        change = "pad routes on the side on which the tokens are padded"
    sentence = f"each sequence is shifted by its own number of tokens ({listed}{more})"
    return trial.judged(fault, sentence, change, shares, log_tries=log_tries)


def _shifted_layers(trial: _Trial) -> Iterator[Hypothesis]:
    """Routers that hold the routes of another layer."""
    sides, region = trial.sides, trial.region
    pool = sorted(sides.layers)
    table = np.full((len(sides.layer_numbers), len(pool)), -1.0)
    rows = np.flatnonzero(trial.rows)
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, 2048).astype(int))] if len(rows) else rows
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
    moved = [(a, b) for a, b in zip(sides.layer_numbers, numbers, strict=True) if a != b]
    if not moved:
        return
    listed = ", ".join(f"layer {a} has the routes of layer {b}" for a, b in moved[:4])
    more = "" if len(moved) <= 4 else f" and {len(moved) - 4} more"
    by_number = Counter(b - a for a, b in moved)
    by_place = Counter(pool.index(b) - pool.index(a) for a, b in moved if a in pool)
    if by_number.most_common(1)[0][1] * 2 > len(moved):
        way = f"the list of tensors is shifted by {by_number.most_common(1)[0][0]:+d} layers"
    elif by_place and by_place.most_common(1)[0][1] * 2 > len(moved):
        way = f"the list of tensors is shifted by {by_place.most_common(1)[0][0]:+d} MoE layers"
    else:
        way = "the layers are in another order"
    sentence = f"{listed}{more}: {way}"
    change = "find each router's routes by its own global layer number, not by an offset that counts dense layers too"
    shares = trial.shares(sides.matches(sides.token, numbers))
    tries = len(moved) * math.log(len(pool))
    yield trial.judged("shifted layers", sentence, change, shares, log_tries=tries)


def _other_steps(trial: _Trial) -> Iterator[Hypothesis]:
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


def _wrapped(trial: _Trial) -> Iterator[Hypothesis]:
    """Ids that went through a uint8 on one side."""
    sides = trial.sides
    top = max(int(ids.max(initial=0)) for ids in [*sides.observed, *sides.layers.values()])
    if top < 256:
        return
    same = np.zeros_like(sides.same)
    there = np.where(sides.compared, sides.token, 0)
    for i, number in enumerate(sides.layer_numbers):
        if number in sides.layers:
            ours, theirs = sides.observed[i], sides.layers[number][there]
            same[i] = (keys(ours % 256) == keys(theirs % 256)) & sides.compared
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


def _stuck(trial: _Trial) -> Iterator[Hypothesis]:
    """One row that one side repeats over contiguous tokens."""
    sides = trial.sides
    ours, theirs = [], []
    there = np.where(sides.compared, sides.token, 0)
    for i in np.flatnonzero(trial.region.routers):
        number = sides.layer_numbers[i]
        if number in sides.layer_keys:
            ours.append(_commonest(sides.observed_keys[i][trial.rows]))
            theirs.append(_commonest(sides.layer_keys[number][there][trial.rows]))
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


def _relabelled(trial: _Trial) -> Iterator[Hypothesis]:
    """Experts under other ids, layer by layer: a load balancer's physical experts."""
    sides, befores, afters, chances, known = trial.sides, [], [], [], []
    there = np.where(sides.compared, sides.token, 0)
    for i in np.flatnonzero(trial.region.routers):
        number = sides.layer_numbers[i]
        if number in sides.layers:
            fit = relabelling(sides.observed[i][trial.rows], sides.layers[number][there][trial.rows])
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
