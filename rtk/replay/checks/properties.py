"""The named checks that need one side only: each takes arrays and returns one Finding with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.layout.model_layout import ModelLayout
from rtk.replay.checks import slots, zero_patterns
from rtk.replay.checks.report import Finding
from rtk.replay.layouts.shard import Shard
from rtk.trace import plausible
from rtk.trace.route_trace import RouteTrace

Numbered = Sequence[tuple[int, npt.NDArray[Any]]]
Mask = npt.NDArray[np.bool_]

# A padding row costs as much as a token. This much more than an even share on one rank is what ran out of memory.
_MAX_PADDING_LOAD = 1.5
_FEW_PADDING_ROWS = 16
# With top-1 expert 0 may be the choice; so many times in a row, it is none.
_ENOUGH_TOP_1 = 24


def layer_numbers(shard: Shard, live: tuple[int, ...], mtp: tuple[int, ...]) -> Finding:
    """`mtp` are the numbers of the MTP routers that have routes of their own."""
    name = "layer numbers"
    wanted = shard.router_layer_numbers
    if live == wanted + mtp:
        also = f", and of MTP layers, counted on as {_listed(mtp)}" if mtp else ""
        return Finding(name, True, f"routers of layers {_listed(wanted)}{also}")
    extra = live[len(wanted) :]
    if live[: len(wanted)] == wanted and extra == tuple(range(1, len(extra) + 1)):
        return Finding(
            name,
            False,
            f"after its own layers {_listed(wanted)} the shard has routers that say layer {_listed(extra)}: MTP layers "
            f"are numbered from 1 by themselves, and would replay the backbone's layer {extra[0]}; give MTP routers "
            "routes of their own, or none",
            extra[0],
            fault="MTP layers",
        )
    wrong = next((a for a, b in zip(live, wanted, strict=False) if a != b), None)
    dense = tuple(layer + 1 for layer in shard.layout.dense_layers)
    return Finding(
        name,
        False,
        f"the live routers are of layers {_listed(live)}, while {shard} of this model holds "
        f"{_listed(wanted)}: check the pipeline rank and the dense layers {_listed(dense)}",
        wrong,
    )


def dense_rows(traces: Sequence[RouteTrace], layout: ModelLayout) -> Finding:
    name = "dense layers empty"
    rows = sum(trace.rows for trace in traces)
    for layer in layout.dense_layers:
        filled = sum(int(trace.routed_experts[:, layer].any(axis=-1).sum()) for trace in traces)
        if filled:
            return Finding(
                name,
                False,
                f"dense layer {layer + 1} has routes in {filled} of {rows} rows: the layers are shifted, "
                "or the layout names the wrong layers as dense",
                layer + 1,
            )
    dense = _listed(layer + 1 for layer in layout.dense_layers)
    return Finding(
        name,
        True,
        f"dense layers {dense} have no routes" if layout.dense_layers else "the model has no dense layers",
    )


def count(arrays: Sequence[npt.NDArray[Any]], live: tuple[int, ...]) -> Finding:
    name = "router count"
    if len(arrays) == len(live):
        return Finding(name, True, f"{len(arrays)} tensors for {len(live)} routers")
    return Finding(
        name,
        False,
        f"{len(arrays)} tensors for {len(live)} routers (layers {_listed(live)}): a dense layer has no router, "
        "so it must have no tensor",
    )


def shape(numbered: Numbered, rows: int, top_k: int) -> Finding:
    name = "token rows"
    for number, array in numbered:
        if array.dtype.kind not in "iu":
            return Finding(name, False, f"layer {number} holds {array.dtype}, ids are whole numbers", number)
        if array.shape == (rows, top_k):
            continue
        said = (
            f"layer {number} has shape {list(array.shape)}, the shard forwards [{rows} tokens, top-{top_k}]"
        )
        if array.ndim == 2 and array.shape[0] > rows and (again := _repeats_itself(array)):
            return Finding(
                name,
                False,
                f"{said}: rows from {again} on repeat those from 0 on, so turns were joined that each hold the rows "
                "of the turns before; ask each turn for its own rows, and check that the server heeds it",
                number,
                again,
                "repeated turns",
            )
        hint = (
            ": the last sampled token has no routes; forward token_ids[:-1]"
            if array.ndim == 2 and array.shape[0] == rows - 1
            else ""
        )
        return Finding(name, False, said + hint, number)
    return Finding(name, True, f"{rows} rows of top-{top_k}")


def _repeats_itself(array: npt.NDArray[Any]) -> int:
    """The first row at which the array starts again, for at least four rows; 0 if it does not."""
    for start in range(4, len(array) - 3):
        length = min(start, len(array) - start, 64)
        if (
            np.array_equal(array[start : start + length], array[:length])
            and (array[:length] != array[0]).any()
        ):
            return start
    return 0


def expert_range(numbered: Numbered, num_experts: int, traces: Sequence[RouteTrace], real: Mask) -> Finding:
    """Of the shard's tensors, and of the traces' other layers: where those hold physical ids, so do these.

    `real` is bool `[rows]`: rows that are not padding.
    """
    name = "expert range"
    for number, array in numbered:
        bad = plausible.out_of_range(array, num_experts)
        if bad.any():
            row = int(np.argmax(bad))
            wrong = next(e for e in array[row].tolist() if not 0 <= e < num_experts)
            fault, why = _outside(array, num_experts, real)
            return Finding(
                name,
                False,
                f"layer {number}, row {row}: expert {wrong} of {num_experts} ({int(bad.sum())} rows "
                f"are out of range): {why}",
                number,
                row,
                fault,
            )
    for trace in traces:
        if trace.rows and int(trace.routed_experts.max()) >= num_experts:
            outside = (trace.routed_experts >= num_experts).any(axis=(0, 2))
            layers = np.flatnonzero(outside) + 1
            # Each layer has to say so by itself: a constant slot or a sentinel of theirs is no physical id.
            causes = {
                _outside(trace.routed_experts[:, layer - 1], num_experts, np.ones(trace.rows, bool))
                for layer in layers
            }
            if len(causes) > 1:
                return Finding(
                    name,
                    False,
                    f"the trace has ids past the {num_experts} experts in layers {_listed(layers)}",
                )
            fault, why = causes.pop()
            return Finding(
                name,
                False,
                f"the trace has ids past the {num_experts} experts in layers {_listed(layers)}, none of them this "
                f"shard's: {why}; those of this shard, which happen to be in range, are no better",
                fault=fault,
            )
    if wrapped := _wrapped(traces, num_experts):
        return Finding(name, False, wrapped, fault="wrapped ids")
    return Finding(name, True, f"all ids lie in 0..{num_experts - 1}")


def _outside(array: npt.NDArray[Any], num_experts: int, real: Mask) -> tuple[str | None, str]:
    """The fault of ids that are no experts', and what it is in words."""
    outside = (array < 0) | (array >= num_experts)
    fixed = slots.constant(array[real])
    columns = np.flatnonzero(outside[real].any(axis=0)).tolist()
    if columns and len(columns) < array.shape[1] and all(slot in fixed for slot in columns):
        held = ", ".join(f"slot {slot} is always {fixed[slot]}" for slot in columns)
        return (
            "constant slot",
            f"{held}: a fused shared expert or a sentinel; cut these slots off before routes leave the server",
        )
    mark = slots.sentinel(array, num_experts)
    if mark is not None:
        return (
            "sentinel ids",
            f"{mark} marks rows or slots that were never written; have the server write all of them, and drop rows "
            "of tokens that it did not forward",
        )
    if (array[outside] >= num_experts).all():
        return (
            "physical experts",
            "ids past the experts are physical ids of a load balancer (EPLB), or belong to another model",
        )
    return (
        None,
        "some are negative and some past the experts, which neither a sentinel nor a load balancer makes",
    )


def _wrapped(traces: Sequence[RouteTrace], num_experts: int) -> str | None:
    """Whether 8-bit ids of more than 256 experts must have wrapped: a sentence, or None.

    Where all experts are about equally likely, so many assignments without one past 255 do not happen. But wrapped
    ids repeat within rows, so that many rows without a repeat say that those experts are just not used.
    """
    if num_experts <= 256 or not all(trace.routed_experts.dtype.itemsize == 1 for trace in traces):
        return None
    layout = traces[0].layout
    routers = sum(trace.rows for trace in traces) * len(layout.moe_layers)
    unlikely = routers * layout.top_k * np.log(num_experts / 256) > 60
    pairs = layout.top_k * (layout.top_k - 1) / 2
    collisions = pairs * 2 * (num_experts - 256) / (num_experts * (num_experts - 1))
    repeats = any(
        (
            plausible.repeated_experts(ids := trace.routed_experts[:, list(layout.moe_layers)])
            & ~plausible.all_zero(ids)
        ).any()
        for trace in traces
    )
    if repeats or not unlikely or routers * collisions > 20:
        return None  # repeats are named by the check of distinct experts
    return (
        f"ids of {num_experts} experts came as 8 bits, and none of {routers * layout.top_k} is past 255: they wrapped; "
        "keep them in uint16 or wider"
    )


def not_zero(
    numbered: Numbered,
    num_experts: int,
    prompt: Mask,
    real: Mask,
    traces: Sequence[RouteTrace],
    own_zero: Callable[[], Mapping[int, Mask]],
) -> Finding:
    """`prompt` and `real` are bool `[rows]`: rows of the prompt, and rows that are not padding.

    `own_zero` gives bool `[rows]` by layer number: where the trace itself has zeros for the row's token. Zeros that stand
    in a tensor alone were made by the trainer, and no capture is to blame.
    """
    name = "not all zero"
    top_1 = {n: plausible.all_zero(a)[real] for n, a in numbered if a.shape[1] == 1}
    cells = sum(len(zero) for zero in top_1.values() if zero.all())
    for number, array in numbered:
        zero = plausible.all_zero(array) & real
        # Experts of a row are distinct, so with top-2 and more a row of zeros cannot be real. With top-1
        # it can: every token at expert 0. Only a whole layer, or the whole prompt, of it is then suspicious.
        if array.shape[1] == 1:
            if zero[real].all():
                zero &= cells >= _ENOUGH_TOP_1
            else:
                zero &= prompt & _only_prompt(zero, prompt & real, real)
        if zero.any():
            bad = np.flatnonzero(zero)
            seen = f"layer {number}: {len(bad)} of {int(real.sum())} rows are all 0, from row {bad[0]} on"
            place = number, int(bad[0])
            if not own_zero().get(number, zero)[zero].all():
                why = "the trace has routes there, so zeros were put in by the trainer: a dense layer's, or an empty buffer"
                return Finding(name, False, f"{seen}: {why}", *place)
            prompt_only = bool(prompt[zero].all()) and not zero[real].all()
            # Of more than 256 experts 0 and 256 wrap to two zeros, and a few such rows are no missing capture.
            wrapped = num_experts > 256 > int(array.max()) > 0 and len(bad) * 20 < len(zero)
            fault = "prompt not captured" if prompt_only else "not captured"
            layout = traces[0].layout
            empty = zero_patterns.empty_layers(traces, layout)
            if zero[real].all() and zero_patterns.may_be_dense(empty, layout):
                why = (
                    f"the layout may be wrong: layers {_listed(empty)} are all zero in every trace, as dense layers are; "
                    "or the server did not capture them, as where the first pipeline stage is not gathered"
                )
                return Finding(name, False, f"{seen}: {why}", *place)
            pattern = zero_patterns.of_rows(zero[real]) + zero_patterns.of_layers(empty, layout)
            return Finding(
                name,
                False,
                f"{seen}{', all of them of the prompt' if prompt_only else ''}: the server did not capture them{pattern}",
                *place,
                None if wrapped else fault,
            )
    return Finding(name, True, "no row is all 0")


def _only_prompt(zero: Mask, prompt: Mask, real: Mask) -> bool:
    """Whether all of the prompt is zero and not the rest, at a length at which top-1 does not do so by accident."""
    rest = real & ~prompt
    return bool(prompt.sum() >= 8 and rest.any() and zero[prompt].all() and zero[rest].mean() < 0.5)


def distinct(numbered: Numbered, num_experts: int, real: Mask) -> Finding:
    """`real` is bool `[rows]`: rows that are not padding. Ids that are no experts' are what `expert_range` is about."""
    name = "distinct experts"
    highest = max((int(array.max(initial=0)) for _, array in numbered), default=0)
    cuts = [slots.cut_from(array[real]) for _, array in numbered]
    if cuts and cuts[0] is not None and len(set(cuts)) == 1:
        return Finding(
            name,
            False,
            f"slots from {cuts[0]} on are 0 in every row of every layer: the server captured {cuts[0]} of "
            f"{numbered[0][1].shape[1]} experts; make its top-k the model's",
            numbered[0][0],
            int(np.argmax(real)),
            "slots not captured",
        )
    for number, array in numbered:
        repeated = plausible.repeated_experts(array) & (~plausible.all_zero(array) | ~real)
        repeated &= ~plausible.out_of_range(array, num_experts)
        if repeated.any():
            row = int(np.argmax(repeated))
            fixed = slots.constant(array[real])
            twice = {slot: value for slot, value in fixed.items() if list(fixed.values()).count(value) > 1}
            seen = f"layer {number}, row {row}: {array[row].tolist()} ({int(repeated.sum())} such rows"
            if twice and len(twice) < array.shape[1] and len(set(twice.values())) == 1:
                why = (
                    f"slots {_listed(twice)} are {array[row, next(iter(twice))]} in every row: fused shared experts or "
                    "a sentinel; cut these slots off before routes leave the server"
                )
                return Finding(name, False, f"{seen}): {why}", number, row, "constant slot")
            if not real[repeated].any():
                fault, why = "repeated padding", "repeats in padding break the token dispatcher"
            elif num_experts > 256 > highest:
                fault, why = "wrapped ids", "repeats come from ids that wrapped at 256"
            else:
                fault, why = "repeated experts", "the routes are not what a router chose"
            return Finding(
                name,
                False,
                f"{seen}, {int((repeated & ~real).sum())} of them padding): a router picks distinct experts; {why}",
                number,
                row,
                fault,
            )
    return Finding(name, True, "the experts of each row differ")


def groups(numbered: Numbered, num_experts: int, num_groups: int, topk_groups: int, real: Mask) -> Finding:
    """DeepSeek-V3's group-limited routing: experts lie in `num_groups` equal groups, of which a row uses `topk_groups`."""
    name = "expert groups"
    size = num_experts // num_groups
    for number, array in numbered:
        ordered = np.sort(array // size, axis=1)
        used = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
        bad = (used > topk_groups) & real
        if bad.any():
            row = int(np.argmax(bad))
            return Finding(
                name,
                False,
                f"layer {number}, row {row}: {array[row].tolist()} lie in {used[row]} groups of {size}, the router picks "
                f"at most {topk_groups} ({int(bad.sum())} such rows): ids are not those of this router's experts",
                number,
                row,
            )
    return Finding(name, True, f"each row keeps to {topk_groups} of {num_groups} groups")


def moving(traces: Sequence[RouteTrace]) -> Finding:
    """Whether one row of routes, of all layers, stands still while the tokens go on."""
    name = "no stuck rows"
    for number, trace in enumerate(traces):
        # Zeros are what not_zero is about, but with top-1 they may be a row like any other.
        routes = trace.routed_experts[:, list(trace.layout.moe_layers)]
        run = plausible.stuck_rows(routes, trace.token_ids.tolist(), zeros_too=trace.layout.top_k == 1)
        if run is not None:
            start, stop = run
            tokens = len(set(trace.token_ids[start : stop + 1].tolist()))
            which = f"sequence {number}, " if len(traces) > 1 else ""
            if start == 0 and stop + 1 >= trace.prompt_tokens and not routes[0].any():
                fault, why = (
                    "prompt not captured",
                    "zeros over all of the prompt, which the server did not capture",
                )
            else:
                fault = "stale rows"
                why = "the server captured stale or padded rows; update it, or prefill in one chunk"
            return Finding(
                name,
                False,
                f"{which}rows {start}..{stop} hold one and the same routes in all layers, over {tokens} "
                f"different tokens: {why}",
                trace.layout.moe_layers[0] + 1,
                start,
                fault,
            )
    return Finding(name, True, "no row is repeated over different tokens")


def padding(
    numbered: Numbered, num_experts: int, ranks: int, padded: Mask, rule: str | None = None
) -> Finding:
    """Padding rows are forwarded like any other, so their experts must be spread over the expert-parallel ranks.

    `rule` is the sentence that says how they were chosen, where that is known.
    """
    name = "padding spread"
    total = int(padded.sum())
    for number, array in numbered:
        rows = array[padded]
        home = rows.astype(np.int64) * ranks // num_experts
        load = np.bincount(np.clip(home, 0, ranks - 1).ravel(), minlength=ranks)
        worst = int(load.argmax())
        even = rows.size / ranks
        # Experts drawn at random are spread well enough too, and vary by this much.
        accident = 3.5 * np.sqrt(even * (1 - 1 / ranks))
        if total >= _FEW_PADDING_ROWS and load[worst] > max(_MAX_PADDING_LOAD * even, even + accident):
            return Finding(
                name,
                False,
                f"layer {number}: {load[worst]} of {rows.size} assignments of the {total} padding rows go to "
                f"expert-parallel rank {worst} of {ranks}, {load[worst] / even:.1f} times an even share: "
                "spread them, as rtk.replay.expand does",
                number,
                int(np.argmax(padded)),
                "unbalanced padding",
            )
    chosen = f": {rule}" if rule else ""
    return Finding(name, True, f"{total} padding rows are spread over {ranks} expert-parallel ranks{chosen}")


def _listed(numbers: Iterable[int]) -> str:
    return "[" + ", ".join(str(number) for number in numbers) + "]"
