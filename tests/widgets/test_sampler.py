"""The sampler without a browser or a server: its controls are driven, and what it shows is read."""

from __future__ import annotations

import asyncio
import base64
import gc
import html.parser
import io
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import ipywidgets
import matplotlib.image
import numpy as np
import pytest

from rtk import RemoteGenerateResult, RouteTrace, Sample
from rtk.errors import LayoutError, RtkError, ServerUnreachable
from rtk.widgets import Sampler

ROOT = Path(__file__).parents[2]


class FakeSession:
    """Stands for a session: answers with the hand-made trace, and remembers what it was asked."""

    def __init__(self, trace: RouteTrace) -> None:
        result = RemoteGenerateResult([14, 15], [-0.5, -1.25], "length", trace.routed_experts)
        self.answer = Sample(" sat\ufffd", [11, 12, 13], result, trace)
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.error: BaseException | None = None
        self.release: asyncio.Event | None = None
        self.cancelled = False

    def sample(self, prompt, *, on_text, **settings):
        self.asked.append((prompt, settings))
        if self.error:
            raise self.error
        on_text(" sat")
        return self.answer

    async def asample(self, prompt, *, on_text, **settings):
        if self.release:
            on_text(" so far")
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        return self.sample(prompt, on_text=on_text, **settings)


class Screen:
    """A widget's parts, found as somebody finds them who looks at it."""

    def __init__(self, widget: ipywidgets.Widget) -> None:
        self.widget = widget

    def parts(self, kind: type) -> list:
        def inside(part):
            return [part, *(found for child in getattr(part, "children", ()) for found in inside(child))]

        return [part for part in inside(self.widget) if isinstance(part, kind)]

    def control(self, description: str):
        return next(
            p for p in self.parts(ipywidgets.Widget) if getattr(p, "description", None) == description
        )

    @property
    def layers(self) -> ipywidgets.SelectMultiple:
        (found,) = self.parts(ipywidgets.SelectMultiple)
        return found

    @property
    def span(self) -> ipywidgets.ToggleButtons:
        (found,) = self.parts(ipywidgets.ToggleButtons)
        return found

    @property
    def page(self) -> str:
        """All the HTML that is shown, without its style."""
        shown = [part.value for part in self.parts(ipywidgets.HTML) if part.layout.display != "none"]
        return re.sub("<style>.*?</style>", "", "\n".join(shown), flags=re.DOTALL)

    def pixels(self) -> np.ndarray:
        (data,) = re.findall("src='data:image/png;base64,([^']+)'", self.page)
        return matplotlib.image.imread(io.BytesIO(base64.b64decode(data)), format="png")

    def table(self) -> list[list[str]]:
        return [
            re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr.*?</tr>", self.page, re.DOTALL)[1:]
        ]

    def tokens(self) -> list[tuple[str, bool, bool]]:
        """Of each token in the strip: its text, whether it is marked, and whether it is underlined."""
        strip = self.page.split("rtk-tokens'>")[1].split("</div>")[0]
        reader = _Tokens()
        reader.feed(strip)
        return reader.found


class _Tokens(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool, bool]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, _):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.found.append((data, "mark" in self.open, "u" in self.open))


@pytest.fixture
def session(trace) -> FakeSession:
    return FakeSession(trace)


@pytest.fixture
def sampler(session) -> Sampler:
    return Sampler(session, prompt="The cat", max_tokens=2, temperature=0.5, top_p=0.9, seed=7)


@pytest.fixture
def screen(sampler) -> Screen:
    return Screen(sampler)


def test_the_button_samples_with_what_the_fields_hold(sampler, screen, session):
    assert sampler.sample is None
    assert sampler.trace is None
    screen.control("Sample").click()
    assert session.asked == [("The cat", {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7})]
    assert sampler.sample is session.answer
    assert sampler.trace is session.answer.trace
    (status,) = (label for label in screen.parts(ipywidgets.Label) if "tokens" in label.value)
    assert status.value == "2 tokens, finish reason: length"
    assert not screen.control("Sample").disabled
    assert screen.control("Stop").disabled


def test_changed_fields_are_what_counts(sampler, screen, session):
    (prompt,) = screen.parts(ipywidgets.Textarea)
    prompt.value = "Another"
    screen.control("max tokens").value = 9
    screen.control("temperature").value = 0.0
    screen.control("top-p").value = 0.25
    screen.control("seed").value = ""
    assert sampler.run() is session.answer
    assert session.asked == [("Another", {"max_tokens": 9, "temperature": 0.0, "top_p": 0.25, "seed": None})]


def test_the_picture_shows_the_selected_layers(sampler, screen):
    sampler.run()
    assert screen.layers.options == (("1", 1), ("3", 3))
    both = screen.pixels()
    assert len(np.unique(both.reshape(-1, both.shape[-1]), axis=0)) > 10
    screen.layers.value = (1,)
    first = screen.pixels()
    screen.layers.value = (3,)
    third = screen.pixels()
    assert first.shape == third.shape
    assert not np.array_equal(first, third)
    assert "in the layers 3'" in screen.page
    screen.layers.value = (1, 3)
    np.testing.assert_array_equal(screen.pixels(), both)


def test_the_picture_shows_the_selected_tokens(sampler, screen):
    sampler.run()
    every = screen.pixels()
    screen.control("tokens").value = (0, 0)
    assert not np.array_equal(screen.pixels(), every)


def test_pyplot_is_left_alone(sampler):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    sampler.run()
    assert plt.get_fignums() == before


def test_the_table_by_hand(sampler, screen):
    """Loads of layer 1 are 4, 3, 0, 1 and of layer 3 are 1, 2, 3, 2; the mean is 2."""
    sampler.run()
    # Entropies in bits: 1/2 * 1 + 3/8 * 1.4150 + 1/8 * 3 = 1.4056, and
    # 1/8 * 3 + 2 * 1/4 * 2 + 3/8 * 1.4150 = 1.9056; the most that 4 experts can have is 2.
    assert screen.table() == [["1", "0.70", "2.00", "0", "1"], ["3", "0.95", "1.50", "2", "0"]]
    screen.layers.value = (3,)
    assert screen.table() == [["3", "0.95", "1.50", "2", "0"]]
    # The one generated token with a route went to the experts 1 and 2.
    screen.span.value = screen.span.options[2][1]
    assert screen.table() == [["3", "0.50", "2.00", "1", "2"]]


def test_spans_and_the_slider_say_the_same(sampler, screen):
    sampler.run()
    slider = screen.control("tokens")
    assert (slider.min, slider.max, slider.value) == (0, 3, (0, 3))
    assert [name for name, _ in screen.span.options] == ["all", "prompt", "generated"]
    screen.span.index = 1
    assert slider.value == (0, 2)
    screen.span.index = 2
    assert slider.value == (3, 3)
    slider.value = (1, 2)
    assert screen.span.index is None
    slider.value = (0, 2)
    assert screen.span.index == 1


def test_one_generated_token_has_no_route_to_choose(sampler, screen, session, trace):
    short = replace(
        trace,
        token_ids=trace.token_ids[:4],
        token_text=trace.token_text[:4],
        routed_experts=trace.routed_experts[:3],
        logprobs=None,
    )
    session.answer = replace(session.answer, trace=short)
    sampler.run()
    assert [name for name, _ in screen.span.options] == ["all", "prompt"]
    assert screen.control("tokens").max == 2


def test_the_token_strip_tells_prompt_and_selection(sampler, screen):
    sampler.run()
    texts = ["The", " cat", " <b>", " sat", "\ufffd"]
    assert [text for text, _, _ in screen.tokens()] == texts
    assert [underlined for _, _, underlined in screen.tokens()] == [True, True, True, False, False]
    assert [marked for _, marked, _ in screen.tokens()] == [True, True, True, True, False]
    assert "4: &#x27;\ufffd&#x27;, id 15, generated, never forwarded" in screen.page
    screen.control("tokens").value = (1, 2)
    assert [marked for _, marked, _ in screen.tokens()] == [False, True, True, False, False]


def test_a_long_strip_says_what_it_leaves_out(sampler, screen, session, trace):
    tokens = 10_000
    long = RouteTrace(
        np.arange(tokens),
        tuple(f"w{i}\n" for i in range(tokens)),
        3,
        np.resize(trace.routed_experts, (tokens - 1, 4, 2)),
        trace.layout,
    )
    session.answer = replace(session.answer, trace=long)
    sampler.run()
    assert screen.tokens()[0] == ("w0↵\n", True, True)
    assert screen.tokens()[-1][0] == " … 8500 tokens …"
    screen.control("tokens").value = (5000, 6000)
    shown = screen.tokens()
    assert shown[0][0] == "… 4950 tokens … "
    assert next(text for text, marked, _ in shown if marked) == "w5000↵\n"
    screen.control("tokens").value = (9990, 9995)
    assert screen.tokens()[-1][0] == "w9999↵\n"


def test_tokens_and_prompts_are_escaped(sampler, screen):
    (prompt,) = screen.parts(ipywidgets.Textarea)
    prompt.value = "<script>alert('x')</script>"
    sampler.run()
    for shown in (screen.page, sampler.static().data):
        assert "&lt;script&gt;" in shown
        assert "&lt;b&gt;" in shown
        assert "<script>" not in shown
        assert "<b>" not in shown


def test_an_error_is_shown_and_the_button_comes_back(sampler, screen, session):
    sampler.run()
    session.error = ServerUnreachable("no inference server answers at <http://x>", url="http://x")
    screen.control("Sample").click()
    assert "no inference server answers at &lt;http://x&gt;" in screen.page
    assert "<img" not in screen.page  # an old picture beside a new error would be taken for its result
    assert sampler.sample is None
    assert not screen.control("Sample").disabled
    with pytest.raises(ServerUnreachable):
        sampler.run()
    session.error = None
    screen.control("Sample").click()
    assert "no inference server" not in screen.page
    assert sampler.sample is session.answer


@pytest.mark.parametrize("error", [LayoutError("the layout is unknown"), ZeroDivisionError("a bug")])
def test_no_error_gets_lost_in_a_running_loop(sampler, screen, session, error):
    session.error = error

    async def run():
        screen.control("Sample").click()
        await until(lambda: not screen.control("Sample").disabled)

    asyncio.run(run())
    assert f"<b>{type(error).__name__}</b>: {error}" in screen.page


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("seed", "x7", "the seed &#x27;x7&#x27; is no whole number"), ("prompt", "", "the prompt is empty")],
)
def test_bad_fields_are_explained(sampler, screen, session, field, value, words):
    if field == "prompt":
        screen.parts(ipywidgets.Textarea)[0].value = value
    else:
        screen.control(field).value = value
    screen.control("Sample").click()
    assert words in screen.page
    assert session.asked == []


def test_impossible_routes_are_said_in_place_of_the_picture(sampler, screen, session, trace):
    physical = trace.routed_experts.copy()
    physical[2, 3, 1] = 9
    session.answer = replace(session.answer, trace=replace(trace, routed_experts=physical))
    sampler.run()
    assert "layer 3 of a trace holds expert ids 1..9 for 4 experts" in screen.page
    assert "<img" not in screen.page


def test_no_layer_at_all_asks_for_one(sampler, screen):
    sampler.run()
    screen.layers.value = ()
    assert "select one or several" in screen.page
    assert "<img" not in screen.page
    screen.layers.value = (3,)
    assert "select one or several" not in screen.page
    assert screen.pixels().size


def test_a_new_sample_keeps_the_selected_layers(sampler, screen):
    sampler.run()
    screen.layers.value = (3,)
    sampler.run()
    assert screen.layers.value == (3,)


def test_old_results_are_not_kept_in_memory(sampler, screen):
    def picture() -> weakref.ref:
        (found,) = (part for part in screen.parts(ipywidgets.HTML) if "<img" in part.value)
        return weakref.ref(found)

    sampler.run()
    before = picture()
    sampler.run()
    gc.collect()
    assert before() is None
    assert picture()() is not None


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it waits for is a widget's state, not an event
            await asyncio.sleep(0.01)


def test_in_a_running_loop_the_button_does_not_block_and_stop_cancels(sampler, screen, session):
    start, stop = screen.control("Sample"), screen.control("Stop")

    async def run():
        session.release = asyncio.Event()
        start.click()
        start.click()  # the second half of a double click
        await until(lambda: "so far" in screen.page)
        assert start.disabled
        with pytest.raises(RtkError, match="sampling already"):
            sampler.run()
        stop.click()
        await until(lambda: not start.disabled)
        assert session.cancelled
        assert session.asked == []
        assert stop.disabled
        assert any(label.value == "stopped" for label in screen.parts(ipywidgets.Label))
        assert "so far" in screen.page
        assert sampler.sample is None
        stop.click()

        start.click()
        session.release.set()
        await until(lambda: not start.disabled)
        assert len(session.asked) == 1
        assert sampler.sample is session.answer

    asyncio.run(run())


def test_stop_right_after_the_click(sampler, screen, session):
    async def run():
        session.release = asyncio.Event()
        screen.control("Sample").click()
        sampler.stop()
        await until(lambda: not screen.control("Sample").disabled)

    asyncio.run(run())
    assert session.cancelled


def test_an_interrupt_goes_through(sampler, screen, session):
    session.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        sampler.run()
    assert not screen.control("Sample").disabled


def test_the_static_page_shows_what_the_widget_shows(sampler, screen):
    with pytest.raises(RtkError, match="press Sample"):
        sampler.static()
    sampler.run()
    screen.layers.value = (3,)
    page = sampler.static().data
    assert "<u>The cat</u> sat\ufffd" in page
    for part in ("rtk-tokens", "data:image/png;base64,", "<td>0.95</td>"):
        assert part in page
    assert "<td>0.70</td>" not in page


def test_importing_the_widgets_brings_no_plotting_along():
    code = "import sys, rtk.widgets; print(sorted({'matplotlib', 'seaborn', 'pandas'} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert output.stdout.strip() == "[]"
