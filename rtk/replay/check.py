"""Do these routes fit this shard's routers? One named check a property, each with its evidence."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.expand import ExpandedRoutes, expand
from rtk.replay.shard import Shard
from rtk.trace import RouteTrace


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: the check's name.
        passed: whether it passed.
        evidence: what was seen; for a failure also where it first goes wrong and what to change.
        layer_number: the Megatron layer number (1-based) at which it first fails; None where the check
            passed or is not about a layer.
    """

    check: str
    passed: bool
    evidence: str
    layer_number: int | None = None


@dataclass(frozen=True)
class ReplayReport:
    """All findings for one shard. Prints as a table, in a terminal and in a notebook.

    Attributes:
        shard: the shard that was checked.
        findings: in the order in which the checks ran; a check that an earlier failure makes meaningless
            is left out.
    """

    shard: Shard
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(finding.passed for finding in self.findings)

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        if self.ok:
            routers = len(self.shard.router_layer_numbers)
            return f"{self.shard}: lined up ({routers} routers, {len(self.findings)} checks passed)"
        failed = [finding.check for finding in self.findings if not finding.passed]
        return f"{self.shard}: NOT lined up ({', '.join(failed)})"

    def raise_for_faults(self) -> None:
        """Stop a training script on the first sign of trouble.

        Raises:
            ShardError: a check failed; the message is the whole table.
        """
        if not self.ok:
            raise ShardError(str(self))

    def __str__(self) -> str:
        width = max(len(finding.check) for finding in self.findings)
        lines = [self.summary]
        for finding in self.findings:
            lines.append(
                f"  {'ok  ' if finding.passed else 'FAIL'}  {finding.check:{width}}  {finding.evidence}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓' if f.passed else '<b>✗ fail</b>'}</td>"
            f"<td style='text-align:left'>{html.escape(f.check)}</td>"
            f"<td style='text-align:left'>{html.escape(f.evidence)}</td></tr>"
            for f in self.findings
        )
        return (
            f"<p><b>{html.escape(self.summary)}</b></p>"
            f"<table><tr><th></th><th style='text-align:left'>check</th><th style='text-align:left'>evidence</th></tr>"
            f"{rows}</table>"
        )


def check(
    trace: RouteTrace,
    shard: Shard,
    *,
    tensors: Sequence[npt.ArrayLike] | None = None,
    layer_numbers: Sequence[int] | None = None,
    tokens: int | None = None,
) -> ReplayReport:
    """Check that routes line up with a shard's routers.

    Args:
        trace: what the rollout recorded.
        shard: the pipeline stage that will replay it.
        tensors: the arrays `[tokens, top_k]` that a trainer is about to install, in its order of routers.
            Left out, those of `rtk.replay.expand` are checked.
        layer_numbers: Megatron layer numbers of the live routers, in order of construction, as
            `rtk.replay.megatron.router_layer_numbers` reads them. Left out, the shard's own rule is used.
        tokens: how many tokens the shard will forward. Left out, the trace's rows.

    Returns:
        A report; faults in the routes are findings in it and raise nothing.

    Raises:
        ShardError: the shard is of another model than the trace, so that there is nothing to compare.
    """
    expected = expand(trace, shard)
    live_numbers = tuple(expected.layer_numbers if layer_numbers is None else map(int, layer_numbers))
    arrays = [np.asarray(t) for t in (expected.tensors if tensors is None else tensors)]
    rows = trace.rows if tokens is None else tokens
    return ReplayReport(shard, tuple(_findings(trace, shard, expected, arrays, live_numbers, rows)))


def _findings(
    trace: RouteTrace,
    shard: Shard,
    expected: ExpandedRoutes,
    arrays: Sequence[npt.NDArray[Any]],
    live_numbers: tuple[int, ...],
    rows: int,
) -> Iterator[Finding]:
    yield _layer_numbers(shard, live_numbers)
    yield _dense_rows(trace)
    count = _count(arrays, live_numbers)
    yield count
    if not count.passed:
        return  # which array belongs to which router is unknown, so every later evidence would mislead
    numbered = list(zip(live_numbers, arrays, strict=True))
    shape = _shape(numbered, rows, shard.layout.top_k)
    yield shape
    if not shape.passed:
        return
    yield _range(numbered, shard.layout.num_experts)
    yield _not_zero(numbered)
    yield _distinct(numbered)
    yield _same_as_trace(numbered, trace)


def _layer_numbers(shard: Shard, live: tuple[int, ...]) -> Finding:
    name = "layer numbers"
    wanted = shard.router_layer_numbers
    if live == wanted:
        return Finding(name, True, f"routers of layers {_listed(live)}")
    wrong = next((a for a, b in zip(live, wanted, strict=False) if a != b), None)
    return Finding(
        name,
        False,
        f"the live routers are of layers {_listed(live)}, while {shard} of this model holds "
        f"{_listed(wanted)}: check the pipeline rank and the dense layers {_listed(_dense_numbers(shard))}",
        wrong,
    )


def _dense_rows(trace: RouteTrace) -> Finding:
    name = "dense layers empty"
    for layer in trace.layout.dense_layers:
        filled = int(trace.routed_experts[:, layer].any(axis=-1).sum())
        if filled:
            return Finding(
                name,
                False,
                f"dense layer {layer + 1} has routes in {filled} of {trace.rows} rows: the layers are shifted, "
                "or the layout names the wrong layers as dense",
                layer + 1,
            )
    return Finding(
        name, True, f"dense layers {_listed(d + 1 for d in trace.layout.dense_layers)} have no routes"
    )


def _count(arrays: Sequence[npt.NDArray[Any]], live: tuple[int, ...]) -> Finding:
    if len(arrays) == len(live):
        return Finding("router count", True, f"{len(arrays)} tensors for {len(live)} routers")
    return Finding(
        "router count",
        False,
        f"{len(arrays)} tensors for {len(live)} routers (layers {_listed(live)}): "
        "give one tensor for each local MoE layer, and none for a dense layer",
    )


def _shape(numbered: list[tuple[int, npt.NDArray[Any]]], rows: int, top_k: int) -> Finding:
    name = "token rows"
    for number, array in numbered:
        if array.dtype.kind not in "iu":
            return Finding(
                name, False, f"layer {number} has dtype {array.dtype}; ids are whole numbers", number
            )
        if array.shape != (rows, top_k):
            hint = ""
            if array.ndim == 2 and array.shape[0] == rows - 1:
                hint = ": the last sampled token has no routes; forward token_ids[:-1]"
            return Finding(
                name,
                False,
                f"layer {number} has shape {list(array.shape)}, the shard forwards [{rows} tokens, top-{top_k}]{hint}",
                number,
            )
    return Finding(name, True, f"{rows} rows of top-{top_k}")


def _range(numbered: list[tuple[int, npt.NDArray[Any]]], num_experts: int) -> Finding:
    name = "expert range"
    for number, array in numbered:
        bad = (array < 0) | (array >= num_experts)
        if bad.any():
            row, slot = np.argwhere(bad)[0]
            return Finding(
                name,
                False,
                f"layer {number}, row {row}: expert {array[row, slot]} of {num_experts} ({int(bad.any(1).sum())} rows "
                "are out of range): ids past the experts are physical ids of a load balancer (EPLB), or "
                "belong to another model",
                number,
            )
    return Finding(name, True, f"all ids lie in 0..{num_experts - 1}")


def _not_zero(numbered: list[tuple[int, npt.NDArray[Any]]]) -> Finding:
    name = "not all zero"
    for number, array in numbered:
        zero = (array == 0).all(axis=1)
        # Experts of a row are distinct, so with top-2 and more a row of zeros cannot be real. With top-1
        # it can: every token at expert 0. Only a whole layer of it is then suspicious.
        impossible = zero if array.shape[1] > 1 else np.full(len(zero), bool(zero.all()))
        if impossible.any():
            bad = np.flatnonzero(impossible)
            return Finding(
                name,
                False,
                f"layer {number}: {len(bad)} of {len(zero)} rows are all 0, from row {bad[0]} on: the server did "
                "not capture them",
                number,
            )
    return Finding(name, True, "no row is all 0")


def _distinct(numbered: list[tuple[int, npt.NDArray[Any]]]) -> Finding:
    name = "distinct experts"
    for number, array in numbered:
        ordered = np.sort(array, axis=1)
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1) & array.any(axis=1)
        if repeated.any():
            row = int(np.argmax(repeated))
            return Finding(
                name,
                False,
                f"layer {number}, row {row}: {array[row].tolist()} ({int(repeated.sum())} such rows): a router picks "
                "distinct experts; repeats come from ids that wrapped at 256 or from bad padding, and break the "
                "token dispatcher",
                number,
            )
    return Finding(name, True, "the experts of each row differ")


def _same_as_trace(numbered: list[tuple[int, npt.NDArray[Any]]], trace: RouteTrace) -> Finding:
    name = "routes of that layer"
    for number, array in numbered:
        # The live number may be one that the model does not have; layer numbers reports that.
        if not 1 <= number <= trace.layout.num_layers or len(array) != trace.rows:
            continue
        own = trace.routed_experts[:, number - 1]
        if np.array_equal(array, own):
            continue
        row = int(np.argmax((array != own).any(axis=1)))
        twins = [
            layer + 1
            for layer in trace.layout.moe_layers
            if layer + 1 != number and np.array_equal(array, trace.routed_experts[:, layer])
        ]
        cause = (
            f"they are the routes of layer {twins[0]}: the list of tensors is shifted by {twins[0] - number:+d} layers"
            if twins
            else "they are no layer's routes: the tokens are others, or in another order"
        )
        return Finding(
            name,
            False,
            f"the tensor for layer {number} differs from the trace from row {row} on; {cause}",
            number,
        )
    return Finding(name, True, "each tensor holds the trace's routes of its own layer")


def _dense_numbers(shard: Shard) -> tuple[int, ...]:
    return tuple(layer + 1 for layer in shard.layout.dense_layers)


def _listed(numbers: Iterator[int] | tuple[int, ...]) -> str:
    return "[" + ", ".join(str(number) for number in numbers) + "]"
