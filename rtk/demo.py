"""The whole road once: serve, sample each domain, show expert usage, check the replay."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rtk import report, usage
from rtk.errors import RtkError
from rtk.replay import ReplayReport, Shard, check
from rtk.serve import embedded, shipped
from rtk.session import Session, connect
from rtk.trace import RouteTrace, save_traces

_PIPELINE_SIZE = 2


def run(out: Path, *, url: str | None = None) -> int:
    """Write heat map, HTML report and traces into `out`; return 0 when the replay check passed, else 1.

    Args:
        out: folder to write into; made where it is missing.
        url: a running server; left out, the embedded one is started, and stopped at the end.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RtkError(f"cannot write the demo's results into {out}: {error}") from error
    with contextlib.ExitStack() as stack:
        if url is None:
            _say("starting the embedded server (a real MoE model, on the CPU) ...")
            url = stack.enter_context(embedded()).url
        session = stack.enter_context(connect(url))
        _say(repr(session))
        groups = _sample_domains(session)
    everything = [trace for traces in groups.values() for trace in traces]
    _say("\nExpert usage per layer, all domains (layers count from 0):\n")
    print(usage.table(everything).to_string(float_format="{:.2f}".format))
    reports = _check_stages(everything)
    _say(
        f"\nReplay check of {len(everything)} traces against a two-stage pipeline (Megatron counts layers from 1).\n"
        "Shown are the first trace that does not line up, or the last of those that do:\n"
    )
    print("\n".join(map(str, reports)))
    _write(out, groups, everything, reports)
    return 0 if all(report.ok for report in reports) else 1


def _sample_domains(session: Session) -> dict[str, list[RouteTrace]]:
    groups: dict[str, list[RouteTrace]] = {}
    for domain, texts in shipped.prompts().items():
        begin = time.monotonic()
        groups[domain] = []
        for seed, text in enumerate(texts):
            sample = session.sample(
                text, max_tokens=48, temperature=0.7, seed=seed, source={"domain": domain}
            )
            assert sample.trace is not None
            groups[domain].append(sample.trace)
        tokens = sum(len(trace.token_ids) for trace in groups[domain])
        _say(f"  {domain:12} {len(texts)} prompts, {tokens} tokens, {time.monotonic() - begin:.1f} s")
    return groups


def _check_stages(traces: list[RouteTrace]) -> list[ReplayReport]:
    """One report a stage: the first trace that does not line up, or the last that does."""
    reports = []
    for rank in range(_PIPELINE_SIZE):
        shard = Shard(traces[0].layout, pipeline_size=_PIPELINE_SIZE, pipeline_rank=rank)
        checked = [check(trace, shard) for trace in traces]
        reports.append(next((report for report in checked if not report.ok), checked[-1]))
    return reports


def _write(
    out: Path, groups: dict[str, list[RouteTrace]], everything: list[RouteTrace], reports: list[ReplayReport]
) -> None:
    save_traces(everything, out / "traces.zip")
    usage.heatmaps(groups).savefig(out / "usage.png", dpi=110)
    page = report.render(groups, reports, title="Which expert did what: four domains of a tiny MoE model")
    (out / "report.html").write_text(page, encoding="utf-8")
    _say(f"\nwritten: {out / 'usage.png'}, {out / 'report.html'}, {out / 'traces.zip'}")


def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)
