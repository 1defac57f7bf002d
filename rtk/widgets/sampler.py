"""Sample from a session and see which experts worked, without writing code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ipywidgets

from rtk.errors import RtkError
from rtk.session.sample import Sample
from rtk.session.session import Session
from rtk.trace.route_trace import RouteTrace
from rtk.widgets import markup
from rtk.widgets.usage_view import UsageView

if TYPE_CHECKING:
    from IPython.display import HTML


class Sampler(ipywidgets.VBox):  # type: ignore[misc]
    """A prompt box with a Sample button; shows the text as it comes in, then the usage of each layer.

    The button's request runs beside the kernel, so other cells run meanwhile, and the Stop button
    cancels it. Errors are shown in the widget.

    Args:
        session: where to sample.
        prompt, max_tokens, temperature, top_p, seed: what the fields hold at first; as `Session.sample`.
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
        self._sample: Sample | None = None
        self._view: UsageView | None = None
        self._task: asyncio.Task[None] | None = None
        self._sampled_prompt = ""
        self._prompt = ipywidgets.Textarea(
            prompt, placeholder="Prompt", rows=4, layout={"width": "auto", "margin": "2px"}
        )
        self._max_tokens = ipywidgets.IntText(max_tokens, **_field("max tokens", 150))
        self._temperature = ipywidgets.FloatText(temperature, step=0.1, **_field("temperature", 150))
        self._top_p = ipywidgets.FloatText(top_p, step=0.05, **_field("top-p", 110))
        self._seed = ipywidgets.Text(
            "" if seed is None else str(seed), placeholder="random", **_field("seed", 130)
        )
        self._start = ipywidgets.Button(
            description="Sample", icon="play", button_style="primary", layout={"width": "100px"}
        )
        self._stop = ipywidgets.Button(
            description="Stop", icon="stop", disabled=True, layout={"width": "90px"}
        )
        self._status = ipywidgets.Label()
        self._error = ipywidgets.HTML(layout={"width": "auto", "display": "none"})
        self._text = ipywidgets.HTML(layout={"width": "auto", "display": "none"})
        self._result = ipywidgets.VBox()
        self._start.on_click(self._clicked)
        self._stop.on_click(self.stop)
        row = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 6px"}
        settings = [self._max_tokens, self._temperature, self._top_p, self._seed]
        super().__init__(
            [
                self._prompt,
                ipywidgets.HBox([*settings, self._start, self._stop, self._status], layout=row),
                self._error,
                self._text,
                self._result,
            ],
            layout={"max_width": "1100px"},
        )

    @property
    def sample(self) -> Sample | None:
        """The sample that is shown; None before the first, and after one that failed or was stopped."""
        return self._sample

    @property
    def trace(self) -> RouteTrace | None:
        """The sample's trace; None where there is no sample."""
        return None if self._sample is None else self._sample.trace

    def run(self) -> Sample:
        """Do what the Sample button does, blocking until it is done; interrupt the kernel to stop it.

        Raises:
            RtkError: the widget is sampling already, the prompt is empty, the seed is no whole number, or as
                `Session.sample`.
        """
        if self._start.disabled:
            raise RtkError("this widget is sampling already; wait, or press its Stop button")
        self._begin()
        with self._sampling():
            sample = self._session.sample(**self._request(), on_text=self._show_text)
            self._show(sample)
        return sample

    def stop(self, _: object = None) -> None:
        """Cancel the request that the Sample button started; does nothing where there is none."""
        task = self._task
        if task is not None and not task.done():
            # JupyterLab runs widget callbacks in a thread of their own, and a cell may call this as well.
            task.get_loop().call_soon_threadsafe(task.cancel)

    def static(self) -> HTML:
        """What is shown now as plain HTML, for a page that runs nothing.

        Raises:
            RtkError: there is no sample to show.
        """
        from IPython.display import HTML

        if self._sample is None or self._view is None:
            raise RtkError("there is no sample to show; press Sample, or call run()")
        return HTML(f"<div>{self._text.value}\n{self._view.html()}</div>")  # type: ignore[no-untyped-call]

    def _clicked(self, _: object) -> None:
        if self._start.disabled:
            return  # the second half of a double click
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with contextlib.suppress(Exception):  # shown in the widget
                self.run()
            return
        # A blocking call here would keep the kernel from hearing of the Stop button.
        self._begin()
        self._stop.disabled = False
        self._task = loop.create_task(self._run_beside())

    async def _run_beside(self) -> None:
        with contextlib.suppress(Exception, asyncio.CancelledError):  # shown in the widget
            with self._sampling():
                self._show(await self._session.asample(**self._request(), on_text=self._show_text))

    def _begin(self) -> None:
        self._start.disabled = True
        self._sample = None
        self._sampled_prompt = self._prompt.value
        self._status.value = "sampling …"
        _put(self._error, "")
        _put(self._text, "")
        self._result.children = ()

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self._status.value = ""
            _put(self._error, markup.error(problem))
            raise
        except BaseException:  # cancelled, or the kernel was interrupted
            self._status.value = "stopped"
            raise
        finally:
            self._stop.disabled = True
            self._start.disabled = False

    def _request(self) -> dict[str, Any]:
        if not self._sampled_prompt:
            raise RtkError("the prompt is empty; write one into the box first")
        seed = self._seed.value.strip()
        try:
            number = int(seed) if seed else None
        except ValueError as error:
            raise RtkError(
                f"the seed {seed!r} is no whole number; leave it empty for a random one"
            ) from error
        return {
            "prompt": self._sampled_prompt,
            "max_tokens": self._max_tokens.value,
            "temperature": self._temperature.value,
            "top_p": self._top_p.value,
            "seed": number,
        }

    def _show_text(self, generated: str) -> None:
        _put(self._text, markup.text(self._sampled_prompt, generated))

    def _show(self, sample: Sample) -> None:
        assert sample.trace is not None
        self._sample = sample
        self._show_text(sample.text)
        result = sample.result
        self._status.value = f"{len(result.token_ids)} tokens, finish reason: {result.stop_reason}"
        before, layers = self._view, None
        if before is not None:
            layers = before.layers if before.trace.layout == sample.trace.layout else None
            before.close()
        self._view = UsageView(sample.trace, layers=layers or None)
        self._result.children = (self._view,)


def _field(description: str, width: int) -> dict[str, Any]:
    return {
        "description": description,
        "style": {"description_width": "initial"},
        "layout": {"width": f"{width}px"},
    }


def _put(widget: ipywidgets.HTML, html: str) -> None:
    widget.value = markup.page(html) if html else ""
    widget.layout.display = None if html else "none"  # an empty line would still take room
