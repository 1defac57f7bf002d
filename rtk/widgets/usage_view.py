"""Expert usage of one trace, for the layers and tokens that are selected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from rtk.trace.route_trace import RouteTrace
from rtk.widgets import markup

_HOW_TO_SELECT = markup.page(markup.note("Ctrl or Shift selects several"))
_LEGEND = markup.note(
    "Prompt tokens are underlined, selected ones tinted. A sampled sequence's last token was never forwarded, "
    "so it has no route."
)


class UsageView(ipywidgets.VBox):  # type: ignore[misc]
    """Heat map and table of one trace, with its tokens; made anew for each trace.

    Args:
        trace: the trace to show; at least one of its tokens has routes.
        layers: the layers selected at first; all MoE layers where left out.
    """

    def __init__(self, trace: RouteTrace, *, layers: Sequence[int] | None = None) -> None:
        self.trace = trace
        moe_layers = trace.layout.moe_layers
        last, prompt_end = trace.rows - 1, min(trace.prompt_tokens, trace.rows) - 1
        spans = {"all": (0, last), "prompt": (0, prompt_end)}
        if prompt_end < last:
            spans["generated"] = (prompt_end + 1, last)
        self._span = ipywidgets.ToggleButtons(
            options=list(spans.items()), style={"button_width": "96px"}, layout={"width": "auto"}
        )
        self._tokens = ipywidgets.IntRangeSlider(
            value=(0, last),
            min=0,
            max=last,
            description="tokens",
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"flex": "1 1 300px", "width": "auto", "max_width": "560px"},
        )
        self._layers = ipywidgets.SelectMultiple(
            options=[(str(layer), layer) for layer in moe_layers],
            value=moe_layers if layers is None else tuple(layers),
            rows=min(12, len(moe_layers)),
            layout={"width": "72px"},
        )
        self._strip = ipywidgets.HTML(layout={"width": "auto"})
        # No ipywidgets.Image: it cannot carry a text for those who do not see it.
        self._picture = ipywidgets.HTML(layout={"max_width": "100%"})
        self._table = ipywidgets.HTML()
        super().__init__(
            [
                _row(self._span, self._tokens),
                self._strip,
                _row(
                    ipywidgets.VBox(
                        [ipywidgets.Label("layers"), self._layers, ipywidgets.HTML(_HOW_TO_SELECT)],
                        layout={"width": "90px"},
                    ),
                    self._picture,
                    self._table,
                ),
            ]
        )
        self._draw()
        self._span.observe(self._span_chosen, "value")
        self._tokens.observe(self._tokens_chosen, "value")
        self._layers.observe(self._draw, "value")

    @property
    def layers(self) -> tuple[int, ...]:
        """The selected layers, 0-based."""
        return tuple(self._layers.value)

    @property
    def tokens(self) -> range:
        """Positions of the selected tokens."""
        first, last = self._tokens.value
        return range(first, last + 1)

    def html(self) -> str:
        """What is to be seen now, without anything to click."""
        return "\n".join(part.value for part in (self._strip, self._picture, self._table))

    def close(self) -> None:
        """Close this widget and all inside it, which ipywidgets would keep in memory otherwise."""
        for child in _inside(self):
            child.close()
        super().close()

    def _span_chosen(self, change: dict[str, Any]) -> None:
        if change["new"] is not None:
            self._tokens.value = change["new"]

    def _tokens_chosen(self, change: dict[str, Any]) -> None:
        spans = [span for _, span in self._span.options]
        self._span.value = change["new"] if change["new"] in spans else None
        self._draw()

    def _draw(self, _: object = None) -> None:
        tokens = slice(self.tokens.start, self.tokens.stop)
        self._strip.value = markup.page(markup.token_strip(self.trace, self.tokens), _LEGEND)
        try:
            picture = markup.usage_picture(self.trace, layers=self.layers, tokens=tokens)
            table = markup.usage_table(self.trace, layers=self.layers, tokens=tokens)
        except Exception as problem:
            # Raised here, in a widget's callback, it would be seen in the kernel's log alone.
            picture, table = "", markup.error(problem)
        self._picture.value = picture
        self._table.value = markup.page(table)


def _row(*children: ipywidgets.Widget) -> ipywidgets.HBox:
    return ipywidgets.HBox(
        children, layout={"flex_flow": "row wrap", "align_items": "flex-start", "grid_gap": "4px 16px"}
    )


def _inside(box: ipywidgets.Widget) -> list[ipywidgets.Widget]:
    children = list(getattr(box, "children", ()))
    return [*children, *(widget for child in children for widget in _inside(child))]
