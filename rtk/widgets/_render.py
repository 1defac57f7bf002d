"""What the widgets show, as HTML and PNG; nothing here knows of ipywidgets.

Colours come from JupyterLab's theme variables or are translucent, so that both themes stay readable.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from rtk import usage
from rtk.trace import RouteTrace

_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:var(--jp-code-font-family,monospace);line-height:1.7"
_PROMPT = "text-decoration:underline;text-decoration-color:#8888;text-underline-offset:4px"
_SELECTED = "background:rgba(90,150,240,.35);border-radius:2px"


def running_text(prompt: str, generated: str) -> str:
    """A prompt, underlined, and what has been generated from it so far."""
    return f'<div style="{_TEXT}"><span style="{_PROMPT}">{html.escape(prompt)}</span>{html.escape(generated)}</div>'


def token_strip(trace: RouteTrace, selected: range, span: usage.Span) -> str:
    """The tokens one by one: the prompt underlined, those that are counted marked, numbers on hovering."""
    spans = []
    for position, text in enumerate(trace.token_text):
        in_prompt = position < trace.prompt_tokens
        counted = (
            position in selected
            and position < trace.rows
            and (span == "all" or (span == "prompt") == in_prompt)
        )
        styles = [style for style, wanted in ((_PROMPT, in_prompt), (_SELECTED, counted)) if wanted]
        title = f"token {position}: id {trace.token_ids[position]}"
        if position >= trace.rows:
            title += ", sampled last and never forwarded: it has no routes"
        # A token that is only a line break would be invisible.
        shown = html.escape(text).replace("\n", "⏎\n")
        spans.append(f'<span title="{title}" style="{";".join(styles)}">{shown}</span>')
    return f'<div style="{_TEXT}">{"".join(spans)}</div>'


def heatmap_png(trace: RouteTrace, layers: Sequence[int], selected: range, span: usage.Span) -> bytes:
    """The heat map of expert usage as a PNG file, drawn without pyplot's global state."""
    from matplotlib.figure import Figure

    width = min(11.0, 2.5 + 0.4 * trace.layout.num_experts)
    figure = Figure(figsize=(width, 1.3 + 0.35 * len(layers)), layout="constrained")
    usage.heatmap(
        trace, span=span, tokens=slice(selected.start, selected.stop), layers=layers, ax=figure.subplots()
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def usage_table(trace: RouteTrace, layers: Sequence[int], selected: range, span: usage.Span) -> str:
    """The selected layers' usage as an HTML table."""
    table = usage.table(trace, span=span, tokens=slice(selected.start, selected.stop)).loc[list(layers)]
    shown = table[["assignments", "evenness", "max_over_mean", "busiest", "unused"]].reset_index()
    rendered: str = shown.to_html(index=False, border=0, float_format="{:.2f}".format, na_rep="–")
    return rendered


def picture(png: bytes, alt: str) -> str:
    """A PNG file as an HTML image that needs nothing beside it."""
    data = base64.b64encode(png).decode()
    return f'<img alt="{html.escape(alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'


def error_box(message: str) -> str:
    """An error as it should be read, at full length."""
    return (
        '<div role="alert" style="border-left:4px solid #d55e00;padding:.4em .8em;background:rgba(213,94,0,.12);'
        f'white-space:pre-wrap;overflow-wrap:anywhere">{html.escape(message)}</div>'
    )
