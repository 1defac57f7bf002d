"""Do these routes fit this shard's routers? One named check a property, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError, TraceError
from rtk.layout.model_layout import ModelLayout
from rtk.replay.checks import properties
from rtk.replay.checks.diagnosis import Diagnosis, diagnose
from rtk.replay.checks.disagreement import MIN_AGREEMENT
from rtk.replay.checks.orders import Tokens, other_orders, tokens_of
from rtk.replay.checks.report import Agreement, Finding, Hypothesis, ReplayReport
from rtk.replay.checks.two_sides import Ids, Sides
from rtk.replay.layouts.batch import Batch, Placement
from rtk.replay.layouts.expand import checked_mtp, expand, padding_rule
from rtk.replay.layouts.shard import Shard
from rtk.trace import plausible
from rtk.trace.route_trace import RouteTrace
from rtk.usage.selection import as_traces

Traces = RouteTrace | Iterable[RouteTrace]


def check(
    traces: Traces,
    shard: Shard,
    *,
    batch: Placement | None = None,
    tensors: Sequence[npt.ArrayLike] | None = None,
    layer_numbers: Sequence[int] | None = None,
    tokens: int | None = None,
    recorded: Mapping[int, npt.ArrayLike] | None = None,
    mtp_routes: Sequence[npt.ArrayLike] | None = None,
    reference: Traces | None = None,
    others: Mapping[str, Traces] | None = None,
    groups: tuple[int, int] | None = None,
    min_agreement: float = MIN_AGREEMENT,
) -> ReplayReport:
    """Check that routes line up with a shard's routers, and find out why where they do not.

    Args:
        traces: what the rollout recorded: one trace, or those of one microbatch.
        shard: the shard that will replay it.
        batch: how the traces become the model's input, an `rtk.replay.Batch`. Left out, the traces stand one
            after the other without padding.
        tensors: the arrays `[rows, top_k]` that a trainer is about to install, in its order of routers.
            Left out, those of `rtk.replay.expand` are checked.
        layer_numbers: Megatron layer numbers of the live routers, in order of construction, as
            `rtk.replay.megatron.router_layer_numbers` reads them. Left out, the shard's own rule is used.
        tokens: how many tokens the shard will forward. Left out, the rows of the traces or of the batch.
        recorded: for each layer number the ids `[rows, top_k]` that the shard's own routers chose for these
            tokens (Megatron's RECORD), in the shard's token order.
        mtp_routes: routes of the MTP layers, as `rtk.replay.expand` takes them. Their routers then come after
            the backbone's in `tensors`, `layer_numbers` and `recorded`, and depth d counts as layer
            `num_layers + d`, as in megatron-core 0.16 and in `rtk.replay.megatron.recording`.
        reference: another engine's traces of the same tokens, in the same order.
        others: traces of other microbatches or steps under a name, to recognise routes that were left over.
        groups: (number of groups, groups a row may use) where the router is group-limited: `n_group` and
            `topk_group` of a DeepSeek config, `moe_router_num_groups` and `moe_router_group_topk` of Megatron's.
        min_agreement: with `recorded` or `reference`, the share of routers of a layer, or of a span of tokens,
            that must choose the same set of experts. R3 (arXiv 2510.11370) reports about 0.9 for correct engines.

    Returns:
        A report; faults in the routes are findings in it and raise nothing.

    Raises:
        ShardError: the shard is of another model than the traces, or `recorded`, `mtp_routes` or `groups` do not
            fit it, so that there is nothing to compare.
        TraceError: the traces have no rows, or `reference` holds other tokens than they.
    """
    several = as_traces(traces)
    for trace in several:
        if trace.layout != shard.layout:
            raise ShardError(
                f"the shard is of a model with {shard.layout}, the trace of one with {trace.layout}"
            )
    if not 0 <= min_agreement <= 1:
        raise ShardError(f"min_agreement is {min_agreement}; it is a share, from 0 to 1")
    if recorded is not None and not isinstance(recorded, Mapping):
        raise ShardError(
            f"recorded is a {type(recorded).__name__}; it maps layer numbers to ids, as rtk.replay.megatron.recording does"
        )
    if isinstance(tensors, Mapping):
        raise ShardError(
            "tensors is a mapping; it is a sequence of arrays in the order in which the trainer installs them"
        )
    if not any(trace.rows for trace in several):
        raise TraceError(
            "the traces have no row of routes, so there is nothing to check: each is a single token, never forwarded"
        )
    if batch is None and (shard.context_size > 1 or (shard.sequence_parallel and shard.tensor_size > 1)):
        batch = Batch.packed(several)
    place = tokens_of(several, shard, batch)
    mtp = _mtp_layers(several, shard, mtp_routes)
    own = shard.router_layer_numbers + tuple(mtp)
    live = tuple(own if layer_numbers is None else map(int, layer_numbers))
    rule = padding_rule(shard) if tensors is None else None
    if tensors is None:
        expanded = expand(several, shard, batch=batch, mtp_routes=mtp_routes)
        tensors = expanded.tensors + expanded.mtp_tensors
    arrays = [_array(tensor, f"tensors[{place}]") for place, tensor in enumerate(tensors)]
    rows = len(place.token) if tokens is None else tokens
    findings = list(_alone(several, shard, place, live, tuple(mtp), arrays, rows, groups))
    task = _Task(
        several, shard, place, batch, live, mtp, {name: as_traces(t) for name, t in (others or {}).items()}
    )
    agreement: Agreement | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    for name, what, sides in task.comparisons(arrays, recorded, reference):
        found = diagnose(sides, min_agreement=min_agreement)
        findings.append(_told(name, what, sides, found))
        agreement = Agreement(what, sides.layer_numbers, sides.same, sides.compared)
        if found is not None:
            hypotheses = found.hypotheses
            break  # the next comparison would only show the same fault through other eyes
    findings += _padding(shard, place, live, arrays, rule)
    return ReplayReport(shard, tuple(findings), agreement, hypotheses)


def _own_zero(traces: Sequence[RouteTrace], place: Tokens) -> dict[int, npt.NDArray[np.bool_]]:
    """bool `[rows]` by layer number: where the trace itself has zeros for the token of a row."""
    there = np.maximum(place.token, 0)
    return {
        number: plausible.all_zero(ids)[there] & (place.token >= 0) for number, ids in _layers(traces).items()
    }


def _padding(
    shard: Shard,
    place: Tokens,
    live: tuple[int, ...],
    arrays: Sequence[npt.NDArray[Any]],
    rule: str | None,
) -> Iterator[Finding]:
    """Last, since rows that are out of place make padding of tokens."""
    if shard.expert_size > 1 and place.padding.any() and len(arrays) == len(live):
        numbered = [
            (number, array)
            for number, array in zip(live, arrays, strict=True)
            if array.shape == (len(place.padding), shard.layout.top_k) and array.dtype.kind in "iu"
        ]
        yield properties.padding(numbered, shard.layout.num_experts, shard.expert_size, place.padding, rule)


def _alone(
    traces: Sequence[RouteTrace],
    shard: Shard,
    place: Tokens,
    live: tuple[int, ...],
    mtp: tuple[int, ...],
    arrays: Sequence[npt.NDArray[Any]],
    rows: int,
    groups: tuple[int, int] | None,
) -> Iterator[Finding]:
    """The checks that look at one side only."""
    layout = shard.layout
    yield properties.layer_numbers(shard, live, mtp)
    yield properties.dense_rows(traces, layout)
    count = properties.count(arrays, live)
    yield count
    if not count.passed:
        return  # which array belongs to which router is unknown, so every later evidence would mislead
    numbered = list(zip(live, arrays, strict=True))
    shape = properties.shape(numbered, rows, layout.top_k)
    yield shape
    if not shape.passed:
        return
    # The shard may forward more rows than there are routes for; those are said to be padding by nobody.
    real, prompt = np.ones(rows, bool), np.zeros(rows, bool)
    known = min(rows, len(place.padding))
    real[:known], prompt[:known] = ~place.padding[:known], place.prompt_rows[:known]
    yield properties.expert_range(numbered, layout.num_experts, traces, real)
    # Asked only where a tensor has zeros: it costs a pass over all routes.
    own_zero = partial(_own_zero, traces, place) if rows == len(place.token) else dict
    yield properties.not_zero(numbered, layout.num_experts, prompt, real, traces, own_zero)
    yield properties.distinct(numbered, layout.num_experts, real)
    yield properties.moving(traces)
    if groups is not None:
        yield properties.groups(numbered, layout.num_experts, *_valid_groups(groups, layout), real)


@dataclass(frozen=True)
class _Task:
    """What there is to compare with what."""

    traces: Sequence[RouteTrace]
    shard: Shard
    place: Tokens
    batch: Placement | None
    live: tuple[int, ...]
    mtp: Mapping[int, Ids]
    others: Mapping[str, Sequence[RouteTrace]]

    @cached_property
    def _own_layers(self) -> dict[int, Ids]:
        return _layers(self.traces) | dict(self.mtp)

    def comparisons(
        self,
        arrays: Sequence[npt.NDArray[Any]],
        recorded: Mapping[int, npt.ArrayLike] | None,
        reference: Traces | None,
    ) -> Iterator[tuple[str, str, Sides]]:
        """A name, what it is compared with, and both sides: exact copies first."""
        top_k, token = self.shard.layout.top_k, self.place.token
        if len(arrays) == len(self.live) and all(
            a.shape == (len(token), top_k) and a.dtype.kind in "iu" for a in arrays
        ):
            # A live number may be one that the model does not have; the check of layer numbers reports that.
            known = [i for i, number in enumerate(self.live) if number in self._own_layers]
            sides = self._sides([self.live[i] for i in known], [arrays[i] for i in known], token, exact=True)
            yield "routes of that layer", "the trace", sides
        if recorded is not None:
            routers = (*self.shard.router_layer_numbers, *self.mtp)
            numbers = [number for number in routers if number in recorded]
            own = [self._record(number, recorded[number]) for number in numbers]
            if not numbers:
                raise ShardError(
                    f"recorded holds layers {sorted(recorded)}, {self.shard} has routers of layers "
                    f"{list(self.shard.router_layer_numbers)}: give it by Megatron's layer numbers"
                )
            yield "agreement with the record", "the shard's own record", self._sides(numbers, own, token)
        if reference is not None:
            numbers = list(self.shard.router_layer_numbers)
            other = self._reference(as_traces(reference))
            sides = self._sides(
                numbers, [other[:, number - 1] for number in numbers], np.arange(len(other)), plain=True
            )
            yield "agreement with the reference", "the reference trace", sides

    def _sides(
        self,
        numbers: Sequence[int],
        observed: Sequence[Ids],
        token: npt.NDArray[np.int64],
        *,
        exact: bool = False,
        plain: bool = False,
    ) -> Sides:
        return Sides(
            tuple(numbers), tuple(observed), self._own_layers, token, self.place.sample, self.place.prompt,
            orders=() if plain else tuple(other_orders(self.traces, self.shard, self.batch, token)),
            others={name: _layers(traces) for name, traces in self.others.items()},
            mtp=tuple(self.mtp), dense=tuple(n + 1 for n in self.shard.layout.dense_layers), exact=exact,
        )  # fmt: skip

    def _record(self, number: int, ids: npt.ArrayLike) -> Ids:
        array = _array(ids, f"recorded[{number}]")
        wanted = (len(self.place.token), self.shard.layout.top_k)
        if array.shape != wanted or array.dtype.kind not in "iu":
            raise ShardError(
                f"recorded[{number}] is {array.dtype} {list(array.shape)}; ids of this shard's tokens are whole numbers "
                f"{list(wanted)}: record the microbatch that the traces and the batch describe"
            )
        return array

    def _reference(self, traces: Sequence[RouteTrace]) -> Ids:
        if len(traces) != len(self.traces):
            raise TraceError(f"{len(traces)} reference traces for {len(self.traces)} traces")
        parts = []
        for number, (own, other) in enumerate(zip(self.traces, traces, strict=True)):
            if other.layout != own.layout or not np.array_equal(
                own.token_ids[: own.rows], other.token_ids[: own.rows]
            ):
                raise TraceError(
                    f"reference trace {number} is of other tokens or of another model than the trace"
                )
            # One of the two may have forwarded its last token as well.
            if other.rows < own.rows:
                raise TraceError(
                    f"reference trace {number} has {other.rows} rows, the trace {own.rows}: swap them, or cut the trace"
                )
            parts.append(other.routed_experts[: own.rows].astype(np.int64))
        return np.concatenate(parts)


def _mtp_layers(
    traces: Sequence[RouteTrace], shard: Shard, mtp_routes: Sequence[npt.ArrayLike] | None
) -> dict[int, Ids]:
    """Routes of the shard's MTP routers by the number that stands for each, as `_layers` has the backbone's."""
    if mtp_routes is None:
        return {}
    arrays = checked_mtp(traces, shard, mtp_routes)
    return {
        shard.layout.num_layers + depth: np.concatenate([ids[:, depth - 1] for ids in arrays])
        for depth in shard.mtp_router_numbers
    }


def _array(ids: npt.ArrayLike, name: str) -> Ids:
    try:
        return np.asarray(ids)
    except ValueError as error:
        raise ShardError(f"{name} is no array [rows, top_k]: {error}") from error


def _layers(traces: Sequence[RouteTrace]) -> dict[int, Ids]:
    return {
        layer + 1: np.concatenate([trace.routed_experts[:, layer] for trace in traces])
        for layer in traces[0].layout.moe_layers
    }


def _valid_groups(groups: tuple[int, int], layout: ModelLayout) -> tuple[int, int]:
    try:
        number, used = groups
    except TypeError as error:
        raise ShardError(f"groups={groups!r}; it is (number of groups, groups that a row may use)") from error
    if number < 1 or layout.num_experts % number or not 1 <= used <= number:
        raise ShardError(
            f"groups={groups}: {layout.num_experts} experts do not divide into {number} groups of which {used} are used"
        )
    return groups


def _told(name: str, what: str, sides: Sides, found: Diagnosis | None) -> Finding:
    """A diagnosis as one line of the report."""
    share = float(sides.same[:, sides.compared].mean()) if sides.same[:, sides.compared].size else 1.0
    if found is None:
        if sides.exact:
            return Finding(name, True, "each tensor holds the trace's routes of its own layer")
        worst = (
            sides.same[:, sides.compared].mean(axis=1) if sides.compared.any() else np.ones(len(sides.same))
        )
        where = (
            f", lowest {worst.min():.1%} at layer {sides.layer_numbers[int(worst.argmin())]}"
            if len(worst)
            else ""
        )
        return Finding(name, True, f"{share:.1%} of routers agree{where}")
    number, row = found.first
    best = found.hypotheses[0] if found.hypotheses and found.hypotheses[0].explains else None
    fault = best.fault if best else None
    if sides.exact:
        why = (
            f"{best.sentence}; {best.change}"
            if best
            else "they are no layer's routes: the tokens are others, or in another order"
        )
        return Finding(
            name,
            False,
            f"the tensor for layer {number} differs from the trace from row {row} on; {why}",
            number,
            row,
            fault,
        )
    place = f"rows {found.start}..{found.stop - 1}" if found.part else "all rows"
    layers = (
        "all layers"
        if len(found.layer_numbers) == len(sides.layer_numbers)
        else f"layers {list(found.layer_numbers)}"
    )
    why = f"{best.sentence}; {best.change}" if best else "nothing that was tried explains it"
    return Finding(
        name,
        False,
        f"{found.agreement:.1%} of routers agree in {place} of {layers}, {share:.1%} in all: {why}",
        number,
        row,
        fault,
    )
