"""The sampler without a browser: its controls are driven, and what it shows is read."""

import asyncio
import io

import matplotlib.image
import numpy as np
import pytest

from rtk import RemoteGenerateResult, Sample
from rtk.errors import RtkError, ServerUnreachable
from rtk.widgets import Sampler

PNG = b"\x89PNG\r\n\x1a\n"


class FakeSession:
    """Stands for a session: answers with the hand-made trace, and remembers what it was asked."""

    def __init__(self, trace):
        result = RemoteGenerateResult([14, 15], [-0.5, -1.25], "length", trace.routed_experts)
        self.answer = Sample(" sat\ufffd", [11, 12, 13], result, trace)
        self.asked = []
        self.error = None
        self.release = None

    def sample(self, prompt, *, on_text, **settings):
        self.asked.append((prompt, settings))
        if self.error:
            raise self.error
        on_text(" sat")
        return self.answer

    async def asample(self, prompt, *, on_text, **settings):
        if self.release:
            on_text(" so far")
            await self.release.wait()
        return self.sample(prompt, on_text=on_text, **settings)


@pytest.fixture
def session(trace):
    return FakeSession(trace)


@pytest.fixture
def widget(session):
    return Sampler(session, prompt="The cat", max_tokens=2, temperature=0.5, top_p=0.9, seed=7)


def pixels(png):
    assert bytes(png).startswith(PNG)
    return matplotlib.image.imread(io.BytesIO(bytes(png)))


def test_the_button_samples_with_the_controls_settings(widget, session):
    assert widget.sample is None
    widget._button.click()
    assert session.asked == [("The cat", {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7})]
    assert widget.sample is session.answer
    assert widget.trace is session.answer.trace
    assert widget._status.value == "2 tokens: it reached max tokens"
    assert not widget._button.disabled
    assert widget._stop.disabled


def test_an_empty_seed_is_no_seed(widget, session):
    widget._seed.value = ""
    widget.run()
    assert session.asked[0][1]["seed"] is None


def test_the_picture_shows_the_selected_layers(widget):
    widget.run()
    both = pixels(widget._picture.value)
    assert len(np.unique(both.reshape(-1, both.shape[-1]), axis=0)) > 10
    assert widget._layers.options == (("layer 1", 1), ("layer 3", 3))
    widget._layers.value = (3,)
    one = pixels(widget._picture.value)
    assert one.shape[0] < both.shape[0]
    widget._layers.value = ()
    np.testing.assert_array_equal(pixels(widget._picture.value), both)


def test_the_table_follows_the_selection(widget):
    widget.run()
    # By hand, layer 1: loads 4, 3, 0, 1, so the largest is twice the mean and one expert is unused.
    assert "<td>2.00</td>" in widget._table.value
    assert widget._table.value.count("<tr") == 3
    widget._span.value = "generated"
    widget._layers.value = (3,)
    assert widget._table.value.count("<tr") == 2
    # One generated token has routes: two assignments.
    assert "<td>2</td>" in widget._table.value
    widget._tokens.value = (0, 1)
    assert "<td>0</td>" in widget._table.value


def test_the_token_strip_marks_what_is_counted(widget):
    widget.run()
    assert widget._text.value.count("background:") == 4  # the last token has no routes
    assert widget._text.value.count("underline;") == 3
    assert "never forwarded" in widget._text.value
    widget._tokens.value = (1, 2)
    assert widget._text.value.count("background:") == 1
    widget._span.value = "generated"
    assert "background:" not in widget._text.value


def test_tokens_and_prompts_are_escaped(widget):
    widget._prompt.value = "<script>alert(1)</script>"
    widget.run()
    for shown in (widget._text.value, widget.static().data):
        assert "&lt;b&gt;" in shown
        assert "<b>" not in shown
    widget._show_text("<i>")
    assert "<script>" not in widget._text.value
    assert "<i>" not in widget._text.value


def test_an_error_is_shown_and_the_button_comes_back(widget, session):
    session.error = ServerUnreachable("no inference server answers at <http://x>", url="http://x")
    widget._button.click()
    assert "no inference server answers at &lt;http://x&gt;" in widget._error.value
    assert not widget._button.disabled
    with pytest.raises(ServerUnreachable):
        widget.run()
    session.error = None
    widget._button.click()
    assert widget._error.value == ""
    assert widget.sample is not None


@pytest.mark.parametrize(
    ("control", "value", "words"), [("_seed", "x", "seed is"), ("_prompt", "", "prompt is empty")]
)
def test_bad_controls_are_explained(widget, session, control, value, words):
    getattr(widget, control).value = value
    widget._button.click()
    assert words in widget._error.value
    assert session.asked == []


def test_in_a_running_loop_the_button_does_not_block_and_stop_cancels(widget, session):
    async def run():
        session.release = asyncio.Event()
        widget._button.click()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert widget._button.disabled
        assert "so far" in widget._text.value
        widget._stop.click()
        await asyncio.wait([widget._task])
        assert widget._status.value == "stopped"
        assert not widget._button.disabled
        assert widget.sample is None

        widget._button.click()
        session.release.set()
        await asyncio.wait([widget._task])
        assert widget.sample is session.answer

    asyncio.run(run())


def test_an_unexpected_failure_is_shown_too(widget, session):
    async def run():
        session.error = ZeroDivisionError("oops")
        widget._button.click()
        await asyncio.wait([widget._task])
        assert "ZeroDivisionError: oops" in widget._error.value

    asyncio.run(run())


def test_static_needs_a_sample(widget):
    with pytest.raises(RtkError, match="press Sample"):
        widget.static()
    widget.run()
    assert "data:image/png;base64," in widget.static().data
