"""What a replay check found: a sentence, a table in a terminal or a notebook, and plain JSON values."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rtk.errors import ShardError
from rtk.replay.checks.agreement_picture import heatmap
from rtk.replay.layouts.shard import Shard

# A sequence may have a million tokens, and neither a table nor a picture has room for them.
_SPANS = 96


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: the check's name.
        passed: whether it passed.
        evidence: what was seen; for a failure also where it first goes wrong and what to change.
        layer_number: the Megatron layer number (1-based) at which it first fails; None where the check
            passed or is not about a layer.
        row: the first row (0-based, in the shard's own token order) at which that layer fails; None as above.
        fault: the name that `rtk.replay.faults` has for it; None where the check passed or the evidence
            fits several.
    """

    check: str
    passed: bool
    evidence: str
    layer_number: int | None = None
    row: int | None = None
    fault: str | None = None


@dataclass(frozen=True)
class Hypothesis:
    """One attempt to explain why two sides of the same routers disagree.

    Agreement is the share of routers, one a token and layer, that chose the same set of experts.

    Attributes:
        fault: the name that `rtk.replay.faults` has for it.
        sentence: what it says happened.
        change: what to change.
        before: agreement where the two sides disagree, as things are, 0 to 1.
        after: agreement in the same place if the hypothesis holds.
        explains: whether `after` is high enough, and too high for chance.
    """

    fault: str
    sentence: str
    change: str
    before: float
    after: float
    explains: bool


@dataclass(frozen=True, eq=False)
class Agreement:
    """Which routers of a shard chose the same set of experts on two sides.

    Attributes:
        against: what the shard's tensors or the trace were compared with, as a noun phrase.
        layer_numbers: Megatron layer numbers of the routers.
        same: bool `[routers, rows]`, rows in the shard's own token order.
        compared: bool `[rows]`; False for padding.
    """

    against: str
    layer_numbers: tuple[int, ...]
    same: npt.NDArray[np.bool_]
    compared: npt.NDArray[np.bool_]

    @property
    def share(self) -> float:
        """Agreement of all routers and tokens; NaN where nothing was compared."""
        return _mean(self.same[:, self.compared])

    @property
    def by_layer(self) -> tuple[float, ...]:
        """Agreement of each router."""
        return tuple(_mean(row[self.compared]) for row in self.same)

    def by_span(self, spans: int = _SPANS) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Agreement of each router in spans of tokens of nearly equal length.

        Args:
            spans: how many at most; a span holds at least one row.

        Returns:
            the edges, int64 `[spans + 1]`, and the shares, float64 `[routers, spans]`; NaN where a span is
            all padding.
        """
        rows = len(self.compared)
        count = max(1, min(spans, rows))
        edges = np.linspace(0, rows, count + 1).astype(np.int64)
        weight = _sums(self.compared[None].astype(np.float64), edges)
        hits = _sums((self.same & self.compared).astype(np.float64), edges)
        with np.errstate(invalid="ignore"):
            return edges, np.where(weight > 0, hits / weight, np.nan)


@dataclass(frozen=True, repr=False)
class ReplayReport:
    """All findings for one shard. Prints as a table, in a terminal and in a notebook.

    Attributes:
        shard: the shard that was checked.
        findings: in the order in which the checks ran; a check that an earlier failure makes meaningless
            is left out.
        agreement: router by router, where there were two sides to compare.
        hypotheses: what was tried to explain a low agreement, best first; empty where it is not low.
    """

    shard: Shard
    findings: tuple[Finding, ...]
    agreement: Agreement | None = None
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(finding.passed for finding in self.findings)

    @property
    def explanation(self) -> Hypothesis | None:
        """The best of the hypotheses, if it truly explains what was seen."""
        return self.hypotheses[0] if self.hypotheses and self.hypotheses[0].explains else None

    @property
    def fault(self) -> str | None:
        """The fault's name in `rtk.replay.faults`; "unknown" where a check failed and nothing names it; None when ok."""
        if self.ok:
            return None
        # A finding that stands alone (zeros, repeats, wrong counts) needs no second side, so it goes first.
        named = [finding.fault for finding in self.findings if not finding.passed and finding.fault]
        if named:
            return named[0]
        return self.explanation.fault if self.explanation else "unknown"

    @property
    def first_bad(self) -> tuple[int, int] | None:
        """Layer number and row at which it first goes wrong; None when ok, or where no cell can be named."""
        for finding in self.findings:
            if not finding.passed and finding.layer_number is not None and finding.row is not None:
                return finding.layer_number, finding.row
        return None

    @property
    def summary(self) -> str:
        """The outcome in one short sentence."""
        if self.ok:
            routers = len(self.shard.router_layer_numbers)
            return f"{self.shard}: lined up ({routers} routers, {len(self.findings)} checks passed)"
        failed = [finding.check for finding in self.findings if not finding.passed]
        return f"{self.shard}: NOT lined up ({', '.join(failed)})"

    @property
    def diagnosis(self) -> str:
        """In one sentence: lined up or not, where it first goes wrong, which fault that is, what to change."""
        if self.ok:
            return f"{self.shard}: lined up"
        place = ""
        if self.first_bad:
            place = f", first at layer {self.first_bad[0]}, row {self.first_bad[1]}"
        if self.fault == "unknown":
            return f"{self.shard}: NOT lined up{place}; the cause is unknown: {self._first_failure.evidence}"
        if self.explanation and self.fault == self.explanation.fault:
            why = f"{self.explanation.sentence}; {self.explanation.change}"
        else:
            why = next(f for f in self.findings if not f.passed and f.fault).evidence
        return f"{self.shard}: NOT lined up{place}: {self.fault}: {why}"

    @property
    def _first_failure(self) -> Finding:
        return next(finding for finding in self.findings if not finding.passed)

    def raise_for_faults(self) -> None:
        """Stop a training script on the first sign of trouble.

        Raises:
            ShardError: a check failed; the message is the whole table.
        """
        if not self.ok:
            raise ShardError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: all of the report; agreement by layer and by at most 96 spans of rows."""
        agreement = None
        if self.agreement is not None:
            edges, shares = self.agreement.by_span()
            agreement = {
                "against": self.agreement.against,
                "layer_numbers": list(self.agreement.layer_numbers),
                "share": _number(self.agreement.share),
                "by_layer": [_number(share) for share in self.agreement.by_layer],
                "span_edges": edges.tolist(),
                "by_span": [[_number(share) for share in row] for row in shares.tolist()],
            }
        return {
            "shard": str(self.shard),
            "router_layer_numbers": list(self.shard.router_layer_numbers),
            "ok": self.ok,
            "fault": self.fault,
            "diagnosis": self.diagnosis,
            "first_bad": None
            if self.first_bad is None
            else {"layer_number": self.first_bad[0], "row": self.first_bad[1]},
            "findings": [asdict(finding) for finding in self.findings],
            "agreement": agreement,
            "hypotheses": [
                asdict(h) | {"before": _number(h.before), "after": _number(h.after)} for h in self.hypotheses
            ],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __repr__(self) -> str:
        """The table: what a reader wants to see of a report at a prompt."""
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = [self.summary]
        for finding in self.findings:
            lines.append(
                f"  {'ok  ' if finding.passed else 'FAIL'}  {finding.check:{width}}  {finding.evidence}"
            )
        for guess in self.hypotheses:
            lines.append(f"  {'why ' if guess is self.explanation else 'not '}  {_told(guess)}")
        if self.explanation:
            lines.append(f"  do    {self.explanation.change}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'✓' if f.passed else '<b>✗ fail</b>'}</td>"
            f"<td style='text-align:left'>{html.escape(f.check)}</td>"
            f"<td style='text-align:left'>{html.escape(f.evidence)}</td></tr>"
            for f in self.findings
        )
        parts = [
            f"<p><b>{html.escape(self.summary)}</b></p>",
            "" if self.ok else f"<p>{html.escape(self.diagnosis)}</p>",
            "<table><tr><th></th><th style='text-align:left'>check</th><th style='text-align:left'>evidence</th></tr>"
            f"{rows}</table>",
        ]
        if self.hypotheses:
            items = "".join(f"<li>{html.escape(_told(guess))}</li>" for guess in self.hypotheses)
            parts.append(
                f"<details><summary>what was tried to explain it</summary><ul>{items}</ul></details>"
            )
        if self.agreement is not None and self.agreement.same.size:
            edges, shares = self.agreement.by_span()
            title = f"Agreement with {self.agreement.against}, layers by tokens"
            parts.append(
                heatmap(
                    shares,
                    edges,
                    self.agreement.layer_numbers,
                    title=title,
                    mark=None if self.ok else self.first_bad,
                )
            )
        return "".join(parts)


def _told(guess: Hypothesis) -> str:
    return f"{guess.fault}: {guess.sentence} (agreement {guess.before:.1%} as it is, {guess.after:.1%} if so)"


def _mean(values: npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _sums(values: npt.NDArray[np.float64], edges: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    totals = np.concatenate([np.zeros((len(values), 1)), values.cumsum(axis=1)], axis=1)
    return np.asarray(totals[:, edges[1:]] - totals[:, edges[:-1]])


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if np.isnan(value) else round(float(value), 6)
