"""Routes that stand at the right layer and at the wrong token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from rtk.replay.checks.evidence import Trial, some
from rtk.replay.checks.report import Hypothesis

# Shifts that are tried one by one, and the usual sizes of a prefill chunk beyond them.
_NEAR, _CHUNKS = 1024, (2048, 4096, 8192, 16384)
# Enough layers and rows to tell one shift from another; the winner is then measured on all of them.
_PROBE_LAYERS, _PROBE_ROWS = 8, 4096


def shifted_tokens(trial: Trial) -> Iterator[Hypothesis]:
    """Rows that hold the routes of a later or earlier token, all by as much or each sequence by its own."""
    sides = trial.sides
    rows = some(np.flatnonzero(trial.rows), _PROBE_ROWS)
    longest = int(np.bincount(sides.sample).max()) if len(sides.sample) else 0
    near = min(longest - 1, _NEAR)
    shifts = [k for k in range(-near, near + 1) if k]
    shifts += [sign * k for k in _CHUNKS if near < k < longest for sign in (-1, 1)]
    shifts.sort(key=abs)  # of two that do as well the smaller one
    probes = some(
        np.flatnonzero([n in sides.layers for n in sides.layer_numbers] & trial.region.routers), _PROBE_LAYERS
    )
    if not len(rows) or not shifts or not len(probes):
        return
    samples, home = np.unique(sides.sample[sides.token[rows]], return_inverse=True)
    hits, counts = _scores(trial, shifts, rows, probes, home)
    # A shift that leaves few rows to compare must not win by a handful of agreements.
    enough = counts.sum(axis=1) * 2 >= len(rows)
    rate = hits.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
    best = int(np.argmax(np.where(enough, rate, -1)))
    yield _shift(trial, {int(s): shifts[best] for s in samples}, math.log(len(shifts)))
    if len(samples) > 1:
        enough_each = counts * 2 >= np.bincount(home, minlength=len(samples))
        rates = np.where(enough_each, hits / np.maximum(counts, 1), -1)
        own = np.argmax(rates, axis=0)
        still, rows_of = _scores(trial, [0], rows, probes, home)
        stays = (still / np.maximum(rows_of, 1))[0] >= rates[own, np.arange(len(samples))]
        each = {int(s): 0 if stays[i] else shifts[own[i]] for i, s in enumerate(samples)}
        if len(set(each.values())) > 1:
            yield _shift(trial, each, len(samples) * math.log(len(shifts)))


def _scores(
    trial: Trial,
    shifts: list[int],
    rows: npt.NDArray[np.int64],
    probes: npt.NDArray[np.int64],
    home: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """For each shift and each sequence (numbered by `home`): agreement summed over its rows, and its rows."""
    sides = trial.sides
    token = sides.token[rows]
    count = int(home.max()) + 1
    hits, counts = np.zeros((len(shifts), count)), np.zeros((len(shifts), count))
    observed = sides.observed_keys[probes][:, rows]
    known = np.stack([sides.layer_keys[sides.layer_numbers[i]] for i in probes])
    for number, shift in enumerate(shifts):
        moved = token + shift
        inside = (moved >= 0) & (moved < len(sides.sample))
        there = np.where(inside, moved, 0)
        inside &= sides.sample[there] == sides.sample[token]
        same = (known[:, there] == observed).mean(axis=0)
        hits[number] = np.bincount(home, weights=same * inside, minlength=count)
        counts[number] = np.bincount(home, weights=inside, minlength=count)
    return hits, counts


def _shift(trial: Trial, shifts: dict[int, int], log_tries: float) -> Hypothesis:
    """The hypothesis that rows of each sequence hold the routes of the token so many further on."""
    sides, token = trial.sides, trial.sides.token
    by_sample = np.zeros(int(sides.sample.max()) + 1, np.int64)
    by_sample[list(shifts)] = list(shifts.values())
    valid = token >= 0
    home = sides.sample[np.where(valid, token, 0)]
    moved = token + by_sample[home]
    inside = valid & (moved >= 0) & (moved < len(sides.sample))
    inside &= sides.sample[np.where(inside, moved, 0)] == home
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
