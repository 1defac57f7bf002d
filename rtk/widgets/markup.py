"""What the widgets show, as HTML and PNG: plain functions of a trace, without any widget."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence

from rtk import usage
from rtk.errors import TraceError
from rtk.trace.route_trace import RouteTrace

# Text takes its colour from the theme around it; backgrounds are see-through tints of Okabe and Ito's
# sky blue and vermilion, which keep apart with every common colour blindness, on white and on black.
_STYLE = """<style>
.rtk-text { font-family: var(--jp-code-font-family, monospace); font-size: 13px; line-height: 1.5; color: inherit;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 18em; overflow-y: auto;
  padding: 6px 10px; margin: 4px 0; border-left: 4px solid #8888; }
.rtk-text u { text-decoration-thickness: 1px; text-underline-offset: 3px; }
.rtk-tokens { line-height: 1.8; }
.rtk-tokens span, .rtk-tokens mark { border-left: 1px solid #8888; padding: 2px 0; color: inherit; }
.rtk-tokens span { opacity: .65; }
.rtk-tokens mark { background: #56b4e966; }
.rtk-note { font-size: 12px; opacity: .8; line-height: 1.5; }
.rtk-error { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; color: inherit;
  padding: 6px 10px; border-left: 4px solid #d55e00; background: #d55e0028; }
table.rtk-usage { border-collapse: collapse; font-size: 13px;
  font-variant-numeric: tabular-nums; color: inherit; line-height: 1.5; margin: 0; }
table.rtk-usage th, table.rtk-usage td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #8886; }
img.rtk-picture { max-width: 100%; height: auto; }
</style>"""

# A browser lays an inch out as 96 pixels; screens with twice as many get a sharp picture too.
_PIXELS_PER_INCH = 96
_SHARPNESS = 2

# A strip of every token of a long context would be megabytes of HTML at each change of the selection.
_STRIP_TOKENS = 1500
_STRIP_LEAD = 50


def page(*parts: str) -> str:
    """Parts of this module's HTML together with the style that they need."""
    return _STYLE + "\n".join(parts)


def text(prompt: str, generated: str) -> str:
    """A prompt, underlined, and what was generated after it."""
    return f"<div class='rtk-text'><u>{html.escape(prompt)}</u>{html.escape(generated)}</div>"


def note(words: str) -> str:
    """An explanation in small print."""
    return f"<div class='rtk-note'>{html.escape(words)}</div>"


def error(problem: BaseException) -> str:
    """A box that says what went wrong."""
    name, message = type(problem).__name__, html.escape(str(problem))
    return f"<div class='rtk-error' role='alert'><b>{name}</b>: {message}</div>"


def token_strip(trace: RouteTrace, selected: range) -> str:
    """The tokens one by one, prompt tokens underlined and selected ones marked.

    Of a long trace, the tokens around the start of the selection; how many are left out is said.
    """
    total = len(trace.token_text)
    start = max(0, min(selected.start - _STRIP_LEAD, total - _STRIP_TOKENS))
    stop = min(total, start + _STRIP_TOKENS)
    before = f"… {start} tokens … " if start else ""
    after = f" … {total - stop} tokens …" if stop < total else ""
    tokens = "".join(_token(trace, position, position in selected) for position in range(start, stop))
    return f"<div class='rtk-text rtk-tokens'>{before}{tokens}{after}</div>"


def _token(trace: RouteTrace, position: int, selected: bool) -> str:
    words = trace.token_text[position]
    kind = "prompt" if position < trace.prompt_tokens else "generated"
    if position >= trace.rows:
        kind += ", never forwarded, so without a route"
    title = html.escape(f"{position}: {words!r}, id {trace.token_ids[position]}, {kind}", quote=True)
    # A line break alone would be an invisible token.
    shown = html.escape(words).replace("\n", "↵\n")
    if position < trace.prompt_tokens:
        shown = f"<u>{shown}</u>"
    tag = "mark" if selected else "span"
    return f"<{tag} title='{title}'>{shown}</{tag}>"


def usage_table(trace: RouteTrace, *, layers: Sequence[int], tokens: slice) -> str:
    """`rtk.usage.table` of some layers as HTML, the columns that fit beside a picture.

    Raises:
        TraceError: as `rtk.usage.counts`.
    """
    columns = ["evenness", "max_over_mean", "busiest", "unused"]
    table = usage.table(trace, tokens=tokens).loc[list(layers), columns].reset_index()
    table = table.rename(columns={"max_over_mean": "max/mean"})
    return table.to_html(index=False, border=0, classes="rtk-usage", float_format="{:.2f}".format)


def usage_picture(trace: RouteTrace, *, layers: Sequence[int], tokens: slice) -> str:
    """`rtk.usage.heatmap` of some layers as an HTML image that carries its PNG inside.

    Raises:
        TraceError: no layer is given, or as `rtk.usage.heatmap`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not layers:
        raise TraceError("no layer is selected; select one or several to see their usage")
    experts = trace.layout.num_experts
    width = min(14.0, 1.6 + 0.33 * experts)
    # Many rows are lower, and few still leave room for the colour bar's label.
    height = max(2.1, 1.0 + len(layers) * max(0.17, min(0.32, 8 / len(layers))))
    # pyplot is left out on purpose: it would make this the current figure, and show it below the cell.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    usage.heatmap(trace, layers=layers, tokens=tokens, ax=figure.subplots())
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_PIXELS_PER_INCH * _SHARPNESS)
    alt = f"Heat map: load of each of {experts} experts in the layers {', '.join(map(str, layers))}"
    return (
        f"<img class='rtk-picture' width='{round(width * _PIXELS_PER_INCH)}' alt='{alt}' "
        f"src='data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}'>"
    )
