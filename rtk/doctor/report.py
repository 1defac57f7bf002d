"""What the doctor found: a table in a terminal and in a notebook, and plain JSON values."""

from __future__ import annotations

import html
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "fail", "warn", "skipped"]

_SHOWN: dict[Status, str] = {"ok": "ok", "fail": "FAIL", "warn": "warn", "skipped": "-"}
_MARKS: dict[Status, str] = {
    "ok": "<span style='color:#1a7f37'>✓ ok</span>",
    "fail": "<b style='color:#c0262d'>✗ fail</b>",
    "warn": "<b style='color:#9a6700'>! warn</b>",
    "skipped": "<span style='color:#777'>– skipped</span>",
}
_MIN_WIDTH = 60
_MAX_WIDTH = 160


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: the check's name.
        status: "ok"; "fail" for what makes routes missing or wrong; "warn" for what deserves a look and
            leaves the routes usable; "skipped" for what could not be checked.
        evidence: what was seen; for a failure also what to do; for a skipped check the reason.
    """

    check: str
    status: Status
    evidence: str


@dataclass(frozen=True)
class DoctorReport:
    """All findings for one server. Prints as a table, in a terminal and in a notebook.

    Attributes:
        url: the server's address.
        findings: in the order in which the checks ran.
        requests: how many requests were sent.
        generations: how many of them generated tokens.
    """

    url: str
    findings: tuple[Finding, ...]
    requests: int
    generations: int

    @property
    def ok(self) -> bool:
        """True when nothing failed; warnings and skipped checks do not count."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that failed."""
        return tuple(finding for finding in self.findings if finding.status == "fail")

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        warnings = sum(finding.status == "warn" for finding in self.findings)
        also = f", {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
        if self.ok:
            return f"{self.url}: healthy{also}"
        return f"{self.url}: NOT healthy ({', '.join(finding.check for finding in self.failed)}){also}"

    @property
    def cost(self) -> str:
        """What the examination cost the server, in one sentence."""
        return f"{self.requests} requests were sent, {self.generations} of which generated a few tokens"

    def __getitem__(self, check: str) -> Finding:
        """The finding of a check, by its name; KeyError where there is none."""
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(check)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: all of the report."""
        return {
            "url": self.url,
            "ok": self.ok,
            "summary": self.summary,
            "requests": self.requests,
            "generations": self.generations,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_text(self, width: int) -> str:
        """The table in lines of at most `width` characters, where a word is not longer; at least 60."""
        width = min(max(width, _MIN_WIDTH), _MAX_WIDTH)
        first = max((len(finding.check) for finding in self.findings), default=0)
        lines = textwrap.wrap(self.summary, width, break_long_words=False, break_on_hyphens=False)
        for finding in self.findings:
            head = f"  {_SHOWN[finding.status]:4}  {finding.check:{first}}  "
            lines += textwrap.wrap(
                finding.evidence,
                width,
                initial_indent=head,
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
            ) or [head.rstrip()]
        return "\n".join([*lines, self.cost])

    def __str__(self) -> str:
        return self.to_text(shutil.get_terminal_size((100, 24)).columns)

    def _repr_html_(self) -> str:
        left = "style='text-align:left;vertical-align:top;white-space:normal'"
        fixed = "style='text-align:left;vertical-align:top;white-space:nowrap'"
        rows = "".join(
            f"<tr><td {fixed}>{_MARKS[f.status]}</td><td {fixed}>{html.escape(f.check)}</td>"
            f"<td {left}>{html.escape(f.evidence)}</td></tr>"
            for f in self.findings
        )
        return (
            f"<p><b>{html.escape(self.summary)}</b></p>"
            f"<table><tr><th></th><th {left}>check</th><th {left}>evidence</th></tr>{rows}</table>"
            f"<p>{html.escape(self.cost)}</p>"
        )
