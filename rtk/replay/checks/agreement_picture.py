"""A small inline SVG of agreement, layers by tokens: no script, no file, legible without colour vision."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Lightness alone carries the order, so that it survives colour blindness and grey print: from dark (no
# router agrees) to light (all agree). The hues are a blue to yellow ramp, which all common kinds of colour
# vision tell apart.
_STEPS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
)
_WIDTH, _ROW, _LEFT, _TOP = 720, 14, 64, 20


def heatmap(
    shares: npt.NDArray[np.float64],
    edges: npt.NDArray[np.int64],
    layer_numbers: Sequence[int],
    *,
    title: str,
    mark: tuple[int, int] | None = None,
) -> str:
    """Draw shares of agreement.

    Args:
        shares: float `[routers, spans]`, 0 to 1, NaN for padding.
        edges: int `[spans + 1]`, the rows at which spans begin and end.
        layer_numbers: one a router.
        title: what is shown; also the picture's text for screen readers.
        mark: layer number and row of a cell to outline.

    Returns:
        an `<svg>` element.
    """
    rows = int(edges[-1]) or 1
    height = _TOP + _ROW * len(layer_numbers) + 34
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{html.escape(title, quote=True)}' "
        f"viewBox='0 0 {_LEFT + _WIDTH + 8} {height}' style='max-width:100%;font:10px sans-serif' fill='currentColor'>",
        f"<text x='0' y='12'>{html.escape(title)}</text>",
    ]
    for line, (number, values) in enumerate(zip(layer_numbers, shares, strict=True)):
        y = _TOP + line * _ROW
        parts.append(f"<text x='{_LEFT - 6}' y='{y + _ROW - 4}' text-anchor='end'>layer {number}</text>")
        for start, stop, step in _runs(values):
            if step is None:
                continue
            left, right = edges[start] / rows * _WIDTH, edges[stop] / rows * _WIDTH
            share = float(np.mean(values[start:stop]))
            parts.append(
                f"<rect x='{_LEFT + left:.1f}' y='{y}' width='{right - left:.1f}' height='{_ROW - 1}' "
                f"fill='{_STEPS[step]}'><title>layer {number}, rows {edges[start]}..{edges[stop] - 1}: "
                f"{share:.1%}</title></rect>"
            )
    if mark is not None and mark[0] in layer_numbers:
        parts.append(_mark(edges, list(layer_numbers).index(mark[0]), mark, rows))
    parts.append(_legend(height - 16))
    return "".join(parts) + "</svg>"


def _runs(values: npt.NDArray[np.float64]) -> list[tuple[int, int, int | None]]:
    """Neighbouring spans of one colour, as (start, stop, step); a clean layer is then one rectangle."""
    steps = [None if np.isnan(v) else min(int(v * len(_STEPS)), len(_STEPS) - 1) for v in values]
    runs: list[tuple[int, int, int | None]] = []
    for position, step in enumerate(steps):
        if runs and runs[-1][2] == step:
            runs[-1] = (runs[-1][0], position + 1, step)
        else:
            runs.append((position, position + 1, step))
    return runs


def _mark(edges: npt.NDArray[np.int64], line: int, mark: tuple[int, int], rows: int) -> str:
    span = min(max(int(np.searchsorted(edges, mark[1], side="right")) - 1, 0), len(edges) - 2)
    left, right = edges[span] / rows * _WIDTH, edges[span + 1] / rows * _WIDTH
    x, y, width = _LEFT + left - 2, _TOP + line * _ROW - 2, max(right - left, 2) + 4
    shape = f"x='{x:.1f}' y='{y}' width='{width:.1f}' height='{_ROW + 3}' fill='none'"
    # Black inside white shows on every step of the ramp, and on a light or a dark page.
    return (
        f"<g class='first-bad'><title>first bad cell: layer {mark[0]}, row {mark[1]}</title>"
        f"<rect {shape} stroke='white' stroke-width='4'/><rect {shape} stroke='black' stroke-width='2'/></g>"
    )


def _legend(y: int) -> str:
    boxes = "".join(
        f"<rect x='{_LEFT + 34 + i * 16}' y='{y}' width='16' height='10' fill='{colour}'/>"
        for i, colour in enumerate(_STEPS)
    )
    end = _LEFT + 40 + 16 * len(_STEPS)
    return (
        f"<text x='{_LEFT}' y='{y + 9}'>0 %</text>{boxes}<text x='{end}' y='{y + 9}'>100 % of routers agree; "
        "outlined: the first bad cell; blank: padding</text>"
    )
