"""A prompt box, a button, and what the experts did with it."""

from __future__ import annotations

import asyncio
from typing import Any

import ipywidgets as ipw
from IPython.display import HTML

from rtk.errors import RtkError
from rtk.session import Sample, Session
from rtk.trace import RouteTrace
from rtk.usage import Span
from rtk.widgets import _render


class Sampler(ipw.VBox):  # type: ignore[misc]
    """Samples from a session and shows which experts were used, per layer and per token.

    The Sample button works while other cells run, and Stop cancels the request. Where no event loop runs,
    as in a script, the button blocks until the sample is there.

    Args:
        session: where to sample from; see `rtk.connect`.
        prompt, max_tokens, temperature, top_p, seed: what the controls start with.

    Attributes:
        sample: the last sample, or None.
    """

    def __init__(
        self,
        session: Session,
        *,
        prompt: str = "",
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> None:
        self._session = session
        self.sample: Sample | None = None
        self._task: asyncio.Task[None] | None = None

        self._prompt = ipw.Textarea(
            prompt,
            placeholder="Type a prompt",
            layout=ipw.Layout(width="auto", height="130px", flex="1 1 auto"),
        )
        narrow = {"layout": ipw.Layout(width="290px"), "style": {"description_width": "92px"}}
        self._max_tokens = ipw.BoundedIntText(
            max_tokens, min=1, max=10**6, description="max tokens", **narrow
        )
        self._temperature = ipw.FloatSlider(
            temperature, min=0, max=2, step=0.05, description="temperature", **narrow
        )
        self._top_p = ipw.FloatSlider(top_p, min=0.01, max=1, step=0.01, description="top-p", **narrow)
        self._seed = ipw.Text(
            "" if seed is None else str(seed), description="seed", placeholder="a new one each time", **narrow
        )
        self._button = ipw.Button(description="Sample", button_style="primary", icon="play")
        self._stop = ipw.Button(description="Stop", icon="stop", disabled=True)
        self._status = ipw.Label()
        self._error = ipw.HTML()
        self._text = ipw.HTML(layout=ipw.Layout(margin="6px 0", min_height="2em"))

        self._span = ipw.ToggleButtons(
            options=["all", "prompt", "generated"], description="tokens", style={"button_width": "90px"}
        )
        self._tokens = ipw.IntRangeSlider(
            value=(0, 1), min=0, max=1, description="from, to", layout=ipw.Layout(width="420px")
        )
        self._layers = ipw.SelectMultiple(
            description="layers", layout=ipw.Layout(width="170px", height="210px")
        )
        self._picture = ipw.Image(format="png", layout=ipw.Layout(max_width="100%", object_fit="contain"))
        self._table = ipw.HTML()
        self._usage = ipw.VBox(
            [
                ipw.HBox([self._span, self._tokens]),
                ipw.HBox([self._layers, self._picture], layout=ipw.Layout(align_items="center")),
                self._table,
            ],
            layout=ipw.Layout(display="none"),
        )
        settings = ipw.VBox([self._max_tokens, self._temperature, self._top_p, self._seed])
        super().__init__(
            [
                ipw.HBox([self._prompt, settings]),
                ipw.HBox([self._button, self._stop, self._status]),
                self._error,
                self._text,
                self._usage,
            ],
            layout=ipw.Layout(max_width="1000px"),
        )
        self._button.on_click(self._on_sample)
        self._stop.on_click(lambda _: self.stop())
        for control in (self._span, self._tokens, self._layers):
            control.observe(self._on_selection, names="value")

    @property
    def trace(self) -> RouteTrace | None:
        """The last sample's routes, or None."""
        return self.sample.trace if self.sample else None

    def run(self) -> Sample:
        """Do what the Sample button does, and wait for it; for scripts and saved notebooks.

        Raises:
            RtkError: as `Session.sample`; the widget shows it too.
        """
        self._begin()
        try:
            prompt, settings = self._request()
            sample = self._session.sample(prompt, on_text=self._show_text, **settings)
        except RtkError as error:
            self._fail(str(error))
            raise
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise
        self._show(sample)
        return sample

    def stop(self) -> None:
        """Cancel the sample that is under way, if there is one."""
        if self._task is not None:
            self._task.cancel()

    def static(self) -> HTML:
        """What the widget shows, as plain HTML that a saved notebook keeps.

        Raises:
            RtkError: nothing has been sampled yet.
        """
        if self.trace is None:
            raise RtkError("there is nothing to show yet: press Sample, or call run()")
        chosen = self._selection()
        alt = f"Load of each expert in layers {', '.join(map(str, chosen[0]))}"
        parts = [
            _render.token_strip(self.trace, *chosen[1:]),
            _render.picture(_render.heatmap_png(self.trace, *chosen), alt),
            _render.usage_table(self.trace, *chosen),
        ]
        return HTML("".join(parts))  # type: ignore[no-untyped-call]

    def _on_sample(self, _: ipw.Button) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            try:
                self.run()
            except RtkError:
                return  # the widget shows it
            return
        self._begin()
        self._task = loop.create_task(self._arun())

    async def _arun(self) -> None:
        try:
            prompt, settings = self._request()
            self._show(await self._session.asample(prompt, on_text=self._show_text, **settings))
        except asyncio.CancelledError:
            self._end("stopped")
        except RtkError as error:
            self._fail(str(error))
        except Exception as error:
            # Nobody awaits this task: what is not shown here would be lost in the kernel's log.
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._task = None

    def _request(self) -> tuple[str, dict[str, Any]]:
        seed = self._seed.value.strip()
        if seed and not seed.removeprefix("-").isdecimal():
            raise RtkError(f"the seed is {seed!r}; give a whole number, or leave it empty")
        if not self._prompt.value:
            raise RtkError("the prompt is empty; type at least one character")
        return self._prompt.value, {
            "max_tokens": self._max_tokens.value,
            "temperature": self._temperature.value,
            "top_p": self._top_p.value,
            "seed": int(seed) if seed else None,
        }

    def _begin(self) -> None:
        self._button.disabled, self._stop.disabled = True, False
        self._status.value = "sampling ..."
        self._error.value = ""
        self._usage.layout.display = "none"
        self._show_text("")

    def _end(self, status: str) -> None:
        self._button.disabled, self._stop.disabled = False, True
        self._status.value = status

    def _fail(self, message: str) -> None:
        self._error.value = _render.error_box(message)
        self._end("")

    def _show_text(self, generated: str) -> None:
        self._text.value = _render.running_text(self._prompt.value, generated)

    def _show(self, sample: Sample) -> None:
        assert sample.trace is not None
        self.sample, trace = sample, sample.trace
        # The controls are set up without redrawing at each step.
        for control in (self._span, self._tokens, self._layers):
            control.unobserve(self._on_selection, names="value")
        self._span.value = "all"
        # The range grows before it moves, or an old one longer than the new trace would be cut twice.
        self._tokens.max = trace.rows
        self._tokens.value = (0, trace.rows)
        layers = trace.layout.moe_layers
        self._layers.options = [(f"layer {layer}", layer) for layer in layers]
        self._layers.value = layers
        for control in (self._span, self._tokens, self._layers):
            control.observe(self._on_selection, names="value")
        self._draw()
        self._usage.layout.display = ""
        stopped = {"stop": "the model ended it", "length": "it reached max tokens"}
        reason = stopped.get(sample.result.stop_reason, sample.result.stop_reason)
        self._end(f"{len(sample.result.token_ids)} tokens: {reason}")

    def _on_selection(self, _: object) -> None:
        if self.trace is not None:
            self._draw()

    def _draw(self) -> None:
        assert self.trace is not None
        chosen = self._selection()
        self._text.value = _render.token_strip(self.trace, *chosen[1:])
        self._picture.value = _render.heatmap_png(self.trace, *chosen)
        self._table.value = _render.usage_table(self.trace, *chosen)

    def _selection(self) -> tuple[tuple[int, ...], range, Span]:
        assert self.trace is not None
        # Nothing selected means no restriction, as an empty filter does everywhere.
        layers = self._layers.value or self.trace.layout.moe_layers
        return tuple(layers), range(*self._tokens.value), self._span.value
