"""The doctor's checks of one answer against another, and of logprobs."""

from __future__ import annotations

from rtk.client.servers.fields import FLOOR_LOGPROB
from rtk.doctor.answer_checks import Subject, moe_layers_of
from rtk.doctor.probe import Answer, Asked
from rtk.doctor.report import Finding, Status
from rtk.errors import RoutesMissing
from rtk.layout.model_layout import ModelLayout
from rtk.trace import plausible

# Two correct passes may differ where two experts score almost the same, in one row of a hundred or so; routes
# of other tokens, or of another layer, agree in far fewer.
_SAME_ENOUGH = 0.9


def repeat(name: str, subject: Subject, other: Asked, what: str) -> Finding:
    """Whether a second answer to the same prompt, chosen greedily, has the same routes."""
    if not isinstance(other, Answer):
        return Finding(name, "fail", f"{what}: {other}")
    if other.routes is None:
        return Finding(
            name, "fail", f"{what}: {other.fault or 'no routes came, while the first time they did'}"
        )
    if other.routes.shape[1:] != subject.routes.shape[1:] or len(other.routes) < len(subject.prompt):
        return Finding(
            name,
            "fail",
            f"{what}: shape {list(other.routes.shape)}, the first time {list(subject.routes.shape)}",
        )
    agreeing = _common(subject.answer.token_ids, other.token_ids)
    rows = min(len(subject.prompt) + agreeing, len(subject.routes), len(other.routes))
    same = plausible.same_experts(subject.routes[:rows], other.routes[:rows])[:, subject.moe_layers]
    # After a token that differs, the two sequences are two sequences.
    until = (
        ""
        if agreeing == len(subject.answer.token_ids)
        else f" up to generated token {agreeing}, which differs"
    )
    if same.all():
        status: Status = "warn" if until else "ok"
        return Finding(name, status, f"{what}: the same experts in {rows} rows{until}")
    share = float(same.mean())
    prompt = same[: len(subject.prompt)]
    said = f"{what}: the same experts in {share:.1%} of {same.size} row-layer pairs{until} ({prompt.mean():.1%} of the prompt's)"
    if min(share, float(prompt.mean())) >= _SAME_ENOUGH:
        return Finding(name, "warn", f"{said}; so much comes from the order of additions in a batch")
    return Finding(name, "fail", f"{said}: routes of other tokens, or stale ones, were sent")


def start_offset(subject: Subject, other: Asked, endpoint: str, first_row: int) -> Finding:
    """Whether the server leaves out the rows before the one that was asked for."""
    name = "start offset"
    if not isinstance(other, Answer) or other.routes is None:
        return Finding(name, "skipped", f"{endpoint} sent no routes to look at")
    total = len(subject.routes)
    if len(other.routes) == total - first_row:
        return Finding(name, "ok", f"{endpoint} leaves out the first {first_row} rows when asked to")
    if len(other.routes) == total:
        return Finding(
            name,
            "warn",
            f"{endpoint} was asked for rows from {first_row} on and sent all {total}: joining the rows of several turns "
            "would count them over again; cut them by their count",
        )
    return Finding(
        name,
        "warn",
        f"{endpoint} was asked for rows from {first_row} on and sent {len(other.routes)}, {total - first_row} are expected",
    )


def streaming(whole: Answer, streamed: Asked, layout: ModelLayout | None) -> Finding:
    """Whether a streamed answer says the same as a whole one to the same prompt with the same cache."""
    name = "streaming"
    if isinstance(streamed, RoutesMissing):
        return Finding(
            name,
            "warn",
            "the stream came without the routes that the whole answer has: the server loses them when its pieces pile up, "
            "or never streams them; ask without streaming where routes must come",
        )
    if not isinstance(streamed, Answer):
        return Finding(name, "fail", str(streamed))
    if streamed.token_ids != whole.token_ids:
        at = _common(whole.token_ids, streamed.token_ids)
        return Finding(name, "warn", f"other tokens than without streaming, from generated token {at} on")
    if whole.routes is None or streamed.routes is None:
        return Finding(name, "ok", f"the same {len(whole.token_ids)} tokens as without streaming")
    if whole.routes.shape != streamed.routes.shape:
        shapes = f"{list(streamed.routes.shape)}, without streaming {list(whole.routes.shape)}"
        return Finding(name, "fail", f"routes of shape {shapes}")
    same = plausible.same_experts(whole.routes, streamed.routes)[:, moe_layers_of(whole.routes, layout)]
    if same.all():
        return Finding(
            name, "ok", f"the same {len(whole.token_ids)} tokens and {len(whole.routes)} rows of routes"
        )
    share = float(same.mean())
    status: Status = "warn" if share >= _SAME_ENOUGH else "fail"
    return Finding(
        name, status, f"the same tokens, but the same experts in {share:.1%} of row-layer pairs only"
    )


def logprobs(answer: Answer) -> Finding:
    """Whether each generated token has a finite natural-log probability."""
    name = "logprobs"
    values = answer.logprobs
    if values is None:
        return Finding(name, "warn", "no logprobs came, although they were asked for")
    if len(values) != len(answer.token_ids):
        return Finding(name, "fail", f"{len(values)} logprobs for {len(answer.token_ids)} tokens")
    missing = sum(value <= FLOOR_LOGPROB for value in values)
    if missing:
        return Finding(
            name,
            "fail",
            f"{missing} of {len(values)} are missing or not finite: the server computes NaN or infinity",
        )
    above = sum(value > 1e-4 for value in values)
    if above:
        return Finding(
            name, "fail", f"{above} of {len(values)} are above 0, so they are no log probabilities"
        )
    return Finding(name, "ok", f"{len(values)} finite values, {min(values):.2f} to {max(values):.2f}")


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences share before they differ."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
