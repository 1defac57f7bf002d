"""One HTML file that shows a set of traces to somebody who has neither rtk nor a network."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rtk import usage
from rtk.replay import ReplayReport
from rtk.trace.route_trace import RouteTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #8886; text-align: right; }
img { max-width: 100%; background: white; border-radius: 4px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .6rem .8rem; border-left: 4px solid #8888; margin: .5rem 0; }
pre b { font-weight: 600; text-decoration: underline; text-decoration-thickness: 1px; text-underline-offset: 3px; }
.meta { opacity: .75; }
"""


def render(
    groups: Mapping[str, Sequence[RouteTrace]], replay_reports: Sequence[ReplayReport], *, title: str
) -> str:
    """The page as a string: usage by group, the replay check, and each group's texts.

    Args:
        groups: named sets of traces of one model.
        replay_reports: one a pipeline stage.
        title: the page's title.
    """
    everything = [trace for traces in groups.values() for trace in traces]
    layout = everything[0].layout
    source = everything[0].source
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p class='meta'>{len(everything)} sequences of {html.escape(str(source.get('model')))} "
        f"(server version {html.escape(str(source.get('server_version')))}, sampled at "
        f"{html.escape(str(source.get('sampled_at')))}). {layout.num_layers} layers, of which "
        f"{len(layout.moe_layers)} are MoE layers with top-{layout.top_k} of {layout.num_experts} experts. "
        "Layers count from 0.</p>",
        "<h2>Expert usage</h2>",
        f"<img alt='Heat maps of the load of each expert, layer by layer, for {html.escape(', '.join(groups))}' "
        f"src='{_data_uri(usage.heatmaps(groups))}'>",
        "<p>A cell is an expert's load over an even load: 1 is even, 0 unused.</p>",
        _usage_tables(groups),
        f"<h2>Replay check</h2><p>All {len(everything)} traces were checked against each pipeline stage; shown is the "
        "first that does not line up, or the last of those that do. Megatron counts layers from 1.</p>",
        *(report._repr_html_() for report in replay_reports),
        "<h2>Samples</h2><p>Prompts are underlined.</p>",
    ]
    for name, traces in groups.items():
        parts.append(f"<h3>{html.escape(name)}</h3>")
        parts += [f"<pre>{_marked_text(trace)}</pre>" for trace in traces]
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        "</body></html>\n"
    )


def _usage_tables(groups: Mapping[str, Sequence[RouteTrace]]) -> str:
    everything = [trace for traces in groups.values() for trace in traces]
    tables = {
        "all": usage.table(everything),
        **{name: usage.table(traces) for name, traces in groups.items()},
    }
    return "".join(
        f"<details{' open' if name == 'all' else ''}><summary>{html.escape(name)}</summary>"
        f"{frame.to_html(float_format='{:.2f}'.format, border=0)}</details>"
        for name, frame in tables.items()
    )


def _marked_text(trace: RouteTrace) -> str:
    prompt = "".join(trace.token_text[: trace.prompt_tokens])
    generated = "".join(trace.token_text[trace.prompt_tokens :])
    return f"<b>{html.escape(prompt)}</b>{html.escape(generated)}"


def _data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
