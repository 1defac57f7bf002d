"""The doctor's checks of one answer's routes: each returns one Finding with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rtk.client.routed_experts import Routes
from rtk.doctor.probe import Answer
from rtk.doctor.report import Finding
from rtk.layout.model_layout import ModelLayout
from rtk.trace import plausible


@dataclass(frozen=True)
class Subject:
    """The answer under examination.

    Attributes:
        endpoint: where it came from.
        prompt: the prompt's token ids.
        answer: the answer; its routes are there and readable.
        layout: the model's layout; None where it is unknown.
    """

    endpoint: str
    prompt: list[int]
    answer: Answer
    layout: ModelLayout | None

    @property
    def routes(self) -> Routes:
        """Expert ids `[rows, layers, top_k]`."""
        assert self.answer.routes is not None
        return self.answer.routes

    @property
    def moe_layers(self) -> list[int]:
        """See `moe_layers_of`."""
        return moe_layers_of(self.routes, self.layout)

    @property
    def moe_routes(self) -> Routes:
        """Expert ids of the MoE layers, `[rows, MoE layers, top_k]`."""
        return self.routes[:, self.moe_layers]


def moe_layers_of(routes: Routes, layout: ModelLayout | None) -> list[int]:
    """By the layout; where it is unknown or another model's, the layers that are not all zero."""
    if layout is not None and layout.num_layers == routes.shape[1]:
        return list(layout.moe_layers)
    return np.flatnonzero(routes.any(axis=(0, 2))).tolist()


def plausibility(subject: Subject) -> Iterator[Finding]:
    """Whether one answer's routes can be a router's; a check that an earlier failure empties is skipped."""
    rows, shape = _rows(subject), _shape(subject)
    yield rows
    yield shape
    wrong_shape = (
        "" if shape.status == "ok" or subject.layout is None else "the routes are of another model's shape"
    )
    yield _guarded("expert range", _range, subject, "" if subject.layout else "the model's layout is unknown")
    zero = _guarded("not all zero", _not_zero, subject, wrong_shape)
    yield zero
    empty = wrong_shape or ("" if zero.status == "ok" else "routes are missing in MoE layers")
    # A prompt that was not captured is what `prompt rows` names, so it is looked at although rows are zero.
    yield _guarded(
        "prompt rows",
        _prompt_rows,
        subject,
        wrong_shape or _unless(rows, "it is unknown which rows are the prompt's") or _unless_some(subject),
    )
    yield _guarded("distinct experts", _distinct, subject, empty)
    yield _guarded(
        "dense layers empty",
        _dense,
        subject,
        wrong_shape or ("" if subject.layout else "the model's layout is unknown"),
    )
    yield _guarded(
        "no stuck rows", _stuck, subject, empty or _unless(rows, "it is unknown which row is which token's")
    )


def _guarded(name: str, check: Callable[[Subject], Finding], subject: Subject, reason: str) -> Finding:
    return Finding(name, "skipped", reason) if reason else check(subject)


def _unless(finding: Finding, reason: str) -> str:
    return "" if finding.status == "ok" else reason


def _unless_some(subject: Subject) -> str:
    return "" if subject.moe_routes.any() else "no row is filled at all"


def _rows(subject: Subject) -> Finding:
    name = "row count"
    prompt, generated = len(subject.prompt), len(subject.answer.token_ids)
    got, wanted = len(subject.routes), prompt + generated - 1
    said = f"{got} rows for {prompt} prompt and {generated} generated tokens"
    if not generated:
        return Finding(name, "skipped", f"{subject.endpoint} does not tell which tokens it generated")
    if got == wanted:
        return Finding(name, "ok", f"{said}; the last token was sampled and never forwarded")
    hint = {
        wanted + 1: "one too many: the last token was never forwarded, so its row is made up",
        generated: "the prompt has no rows",
        generated - 1: "the prompt has no rows",
        prompt: "the generated tokens have no rows",
    }.get(got, "rows belong to other tokens than those of the answer")
    return Finding(name, "fail", f"{said}, {wanted} are expected: {hint}; do not train on them")


def _shape(subject: Subject) -> Finding:
    name = "layers and top-k"
    layers, top_k = subject.routes.shape[1:]
    layout, dtype = subject.layout, subject.routes.dtype
    said = f"{layers} layers, top-{top_k}, {dtype}"
    if layout is None:
        return Finding(name, "warn", f"{said}; there is no layout to compare with")
    if (layers, top_k) == (layout.num_layers, layout.top_k):
        return Finding(name, "ok", f"{said}, as the model's config has it")
    hint = ": only MoE layers are sent" if layers == len(layout.moe_layers) else ""
    return Finding(
        name, "fail", f"{said}, the model's config has {layout.num_layers} layers, top-{layout.top_k}{hint}"
    )


def _range(subject: Subject) -> Finding:
    name = "expert range"
    assert subject.layout is not None
    experts = subject.layout.num_experts
    bad = plausible.out_of_range(subject.routes, experts)
    if not bad.any():
        top = int(subject.routes.max(initial=0))
        return Finding(name, "ok", f"ids lie in 0..{experts - 1}; the largest seen is {top}")
    row, layer = np.argwhere(bad)[0]
    return Finding(
        name,
        "fail",
        f"layer {layer}, row {row}: {subject.routes[row, layer].tolist()} of {experts} experts ({int(bad.sum())} such rows "
        "in all layers): physical ids of a load balancer (EPLB), or ids of another model; update the server, or "
        "switch its load balancer off",
    )


def _not_zero(subject: Subject) -> Finding:
    name = "not all zero"
    zero = plausible.all_zero(subject.moe_routes)
    layers = subject.moe_layers
    if not layers or zero.all():
        which = "all layers" if subject.layout is None else f"all {len(layers)} MoE layers"
        return Finding(
            name,
            "fail",
            f"{which} are 0 in all {len(subject.routes)} rows: the server never captured its routers. Its MoE kernel "
            "may bypass the capture: try another (--moe-backend triton on vLLM), or update",
        )
    if subject.routes.shape[2] == 1:
        zero = np.broadcast_to(
            zero.all(axis=0), zero.shape
        )  # with top-1, expert 0 is a choice like any other
    if not zero.any():
        return Finding(name, "ok", f"each row of the {len(layers)} MoE layers is filled")
    worst = int(zero.sum(axis=0).argmax())
    return Finding(
        name,
        "fail",
        f"layer {layers[worst]} is 0 in {int(zero[:, worst].sum())} of {len(zero)} rows, from row "
        f"{int(zero[:, worst].argmax())} on ({int(zero.any(axis=0).sum())} of {len(layers)} MoE layers have such rows): "
        "the server did not capture them",
    )


def _prompt_rows(subject: Subject) -> Finding:
    name = "prompt rows"
    zero = np.asarray(plausible.all_zero(subject.moe_routes).all(axis=1))
    prompt, generated = zero[: len(subject.prompt)], zero[len(subject.prompt) :]
    empty = [(part, flags) for part, flags in (("prompt", prompt), ("generated", generated)) if flags.any()]
    if not empty:
        return Finding(name, "ok", f"{len(prompt)} prompt and {len(generated)} generated rows are filled")
    part, flags = empty[0]
    return Finding(
        name,
        "fail",
        f"{int(flags.sum())} of {len(flags)} {part} rows are 0 in every MoE layer, while others are filled: the server "
        "looks them up in the wrong place, as it does for hybrid models and chunked prefill; update it",
    )


def _distinct(subject: Subject) -> Finding:
    name = "distinct experts"
    repeated = plausible.repeated_experts(subject.moe_routes)
    if not repeated.any():
        return Finding(name, "ok", "the experts of each row differ")
    row, place = np.argwhere(repeated)[0]
    return Finding(
        name,
        "fail",
        f"layer {subject.moe_layers[place]}, row {row}: {subject.moe_routes[row, place].tolist()} ({int(repeated.sum())} "
        f"such rows): a router picks distinct experts; ids may have wrapped at 256 (they came as {subject.routes.dtype})",
    )


def _dense(subject: Subject) -> Finding:
    name = "dense layers empty"
    assert subject.layout is not None
    dense = subject.layout.dense_layers
    if not dense:
        return Finding(name, "ok", "the model has no dense layers")
    filled = {layer: int((~plausible.all_zero(subject.routes[:, layer])).sum()) for layer in dense}
    layer = next((layer for layer, rows in filled.items() if rows), None)
    if layer is None:
        return Finding(name, "ok", f"dense layers {_listed(dense)} have no routes")
    return Finding(
        name,
        "fail",
        f"dense layer {layer} has routes in {filled[layer]} of {len(subject.routes)} rows: layers are shifted, or the "
        "layout names the wrong ones as dense",
    )


def _stuck(subject: Subject) -> Finding:
    name = "no stuck rows"
    tokens = subject.prompt + subject.answer.token_ids
    run = plausible.stuck_rows(subject.moe_routes, tokens)
    if run is None:
        return Finding(name, "ok", "no row stands still while the tokens change")
    start, stop = run
    return Finding(
        name,
        "fail",
        f"rows {start}..{stop} hold one and the same routes in all layers, over {len(set(tokens[start : stop + 1]))} "
        "different tokens: stale or padded rows; update the server, or prefill in one chunk",
    )


def _listed(numbers: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"
