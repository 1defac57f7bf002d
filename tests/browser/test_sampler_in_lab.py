"""The Sampler in JupyterLab in a real browser: its buttons are clicked, and the picture that comes is read."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from aiohttp import web

from tests.stub import serving

pytestmark = pytest.mark.browser
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
# Root gets no sandbox; the other flags keep the browser from talking to anybody but Lab.
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIMEOUT_S = 60
PROMPT = "It was a cold evening, <b>and the whole party"


class EndlessServer:
    """Answers each generate request with one token and then nothing, until the client leaves."""

    def __init__(self) -> None:
        self.left = threading.Event()
        ready: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop]] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(ready),), daemon=True)
        self._thread.start()
        self.url, self._loop = ready.get(timeout=TIMEOUT_S)

    async def _serve(self, ready) -> None:
        async with serving(self._answer) as stub:
            ready.put((stub.url, asyncio.get_running_loop()))
            await self._stop.wait()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        answers = {
            "/v1/models": {"data": [{"id": "endless"}]},
            "/version": {"version": "0"},
            "/tokenize": {"tokens": [1, 2]},
            "/detokenize": {"prompt": " first words"},
        }
        if request.path in answers:
            return web.json_response(answers[request.path])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = {"choices": [{"index": 0, "token_ids": [3], "finish_reason": None}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return response

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def endless() -> Iterator[EndlessServer]:
    server = EndlessServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory, embedded_server, endless) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own."""
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    home = tmp_path_factory.mktemp("lab")
    _write_notebook(
        home / "notebooks" / "sampler.ipynb",
        f"import rtk\n\nsession = rtk.connect({embedded_server.url!r})",
        "sampler = rtk.widgets.Sampler(session, temperature=0)\nsampler",
        "sampler.trace",
        f"rtk.widgets.Sampler(rtk.connect({endless.url!r}, layout=session.layout, server='vllm'), prompt='x')",
    )
    # Lab would ask whether it may fetch its news, in a box over the notebook.
    notices = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notices.parent.mkdir(parents=True)
    notices.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
        "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home / 'notebooks'}",
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # The settings of whoever runs this have no say.
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=home)
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status?token={token}", process, home / "log")
            yield f"http://127.0.0.1:{port}/lab/tree/sampler.ipynb?token={token}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _write_notebook(path: Path, *cells: str) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
        # Without it, Lab asks which kernel to start.
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    path.parent.mkdir()
    nbformat.write(notebook, path)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-3000:]}")


class Notebook:
    """The notebook on the screen."""

    def __init__(self, page) -> None:
        self.page = page

    def command(self, name: str, **arguments: object) -> None:
        """Start one of Lab's commands, without waiting for its end."""
        self.page.evaluate("([name, args]) => { jupyterapp.commands.execute(name, args) }", [name, arguments])

    def cell(self, number: int):
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int):
        return self.cell(number).locator(".jp-OutputArea")

    def run_cell(self, number: int) -> None:
        """Run a cell and wait until it has its next number, which it gets when it is done."""
        prompt = self.cell(number).locator(".jp-InputPrompt")
        before = int(re.sub(r"\D", "", prompt.text_content()))
        prompt.click()
        self.command("notebook:run-cell")
        self.page.wait_for_function(
            "([element, before]) => parseInt(element.textContent.slice(1)) > before",
            arg=[prompt.element_handle(), before],
        )

    def screenshot(self, name: str) -> None:
        folder = os.environ.get("RTK_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(folder) / f"{name}.png")


class Widget:
    """A Sampler in a cell's output, as somebody sees it who looks at the screen."""

    def __init__(self, output) -> None:
        self.output = output
        self.text = output.locator(".rtk-text:not(.rtk-tokens)")
        self.tokens = output.locator(".rtk-tokens")
        self.picture = output.locator("img.rtk-picture")
        self.rows = output.locator("table.rtk-usage tbody tr")
        self.error = output.locator(".rtk-error")

    def button(self, name: str):
        return self.output.locator("button", has_text=name)

    def ask(self, prompt: str, max_tokens: int) -> None:
        """Fill in the fields and click."""
        self.output.locator("textarea").fill(prompt)
        field = self.output.get_by_role("spinbutton").first
        field.fill(str(max_tokens))
        field.press("Enter")
        self.button("Sample").click()

    def sample(self, prompt: str, max_tokens: int) -> None:
        """As `ask`, then wait for the picture; max_tokens must differ from those of the sample before."""
        self.ask(prompt, max_tokens)
        expect(self.output.get_by_text(f"{max_tokens} tokens, finish reason: length")).to_be_visible()
        expect(self.picture).to_be_visible()

    def source(self) -> str:
        return self.picture.get_attribute("src")

    def pixels(self) -> np.ndarray:
        kind, data = self.source().split(",")
        assert kind == "data:image/png;base64"
        return matplotlib.image.imread(io.BytesIO(base64.b64decode(data)))


@pytest.fixture(scope="module")
def notebook(lab) -> Iterator[Notebook]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1200})
        page.set_default_timeout(TIMEOUT_S * 1000)
        playwright_api.expect.set_options(timeout=TIMEOUT_S * 1000)
        notebook = Notebook(page)
        page.goto(lab)
        # Cells that are run before the kernel is there are forgotten.
        page.get_by_text(re.compile(r"^Python 3.* \| Idle$")).wait_for()
        notebook.command("notebook:run-all-cells")
        notebook.output(3).locator("textarea").wait_for()
        yield notebook
        browser.close()


@pytest.fixture
def sampler(notebook) -> Widget:
    return Widget(notebook.output(1))


def expect(locator):
    return playwright_api.expect(locator)


def test_a_click_brings_the_text_and_the_heat_map(notebook, sampler):
    sampler.ask(PROMPT, max_tokens=48)
    expect(sampler.text).to_contain_text(re.compile(re.escape(PROMPT) + ".+", re.DOTALL))
    expect(sampler.picture).to_be_visible()
    expect(sampler.output.get_by_text("48 tokens, finish reason: length")).to_be_visible()
    assert sampler.text.locator("u").text_content() == PROMPT
    assert sampler.output.locator("b").count() == 0

    pixels = sampler.pixels()
    box = sampler.picture.bounding_box()
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx(box["width"] / box["height"], rel=0.02)
    assert box["width"] > 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 100
    assert "16 experts in the layers 1, 2, 3, 4, 5, 6, 7" in sampler.picture.get_attribute("alt")
    assert [row.locator("td").first.text_content() for row in sampler.rows.all()] == list("1234567")
    notebook.screenshot("sampler")

    notebook.run_cell(2)
    expect(notebook.output(2)).to_contain_text("48 generated tokens")


def test_layers_and_tokens_are_selected(sampler):
    sampler.sample(PROMPT, max_tokens=12)
    all_layers, all_tokens = sampler.pixels(), sampler.tokens.locator("mark").count()

    sampler.output.locator("select").select_option(["2", "5"])
    expect(sampler.rows).to_have_count(2)
    two_layers = sampler.pixels()
    assert two_layers.shape[0] < all_layers.shape[0]
    assert two_layers.shape[1] == all_layers.shape[1]

    before = sampler.source()
    sampler.button("generated").click()
    expect(sampler.picture).not_to_have_attribute("src", before)
    # The last of the twelve was never forwarded.
    assert sampler.tokens.locator("mark").count() == 11
    assert sampler.tokens.locator("mark u").count() == 0

    sampler.button("prompt").click()
    expect(sampler.tokens.locator("mark")).to_have_count(all_tokens - 11)
    assert sampler.tokens.locator("mark u").count() == all_tokens - 11


def test_other_cells_run_meanwhile_and_stop_leaves_the_request(notebook, endless):
    widget = Widget(notebook.output(3))
    widget.button("Sample").click()
    expect(widget.text).to_contain_text("x first words")
    expect(widget.output.get_by_text("sampling …")).to_be_visible()
    expect(widget.button("Sample")).to_be_disabled()

    notebook.run_cell(2)
    expect(widget.button("Stop")).to_be_enabled()
    assert not endless.left.is_set()

    widget.button("Stop").click()
    expect(widget.output.get_by_text("stopped")).to_be_visible()
    expect(widget.button("Sample")).to_be_enabled()
    expect(widget.text).to_contain_text("x first words")
    assert endless.left.wait(TIMEOUT_S)


def test_an_error_is_shown_where_the_button_was_clicked(notebook, sampler):
    sampler.ask("cold " * 600, max_tokens=8)
    expect(sampler.error).to_contain_text("maximum model length of 512")
    expect(sampler.button("Sample")).to_be_enabled()
    assert sampler.picture.count() == 0
    notebook.screenshot("sampler_error")


@pytest.mark.parametrize(("theme", "tokens"), [("JupyterLab Dark", 24), ("JupyterLab Light", 25)])
def test_readable_in_every_theme(notebook, sampler, theme, tokens):
    notebook.command("apputils:change-theme", theme=theme)
    page = notebook.page
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=theme)
    sampler.sample(PROMPT, tokens)
    sampler.output.locator("select").select_option(list("1234567"))
    expect(sampler.rows).to_have_count(7)
    sampler.button("generated").click()
    expect(sampler.tokens.locator("mark")).to_have_count(tokens - 1)
    notebook.screenshot("sampler_" + theme.rsplit(" ")[1].lower())
    for part in (sampler.text, sampler.tokens.locator("mark").first, sampler.rows.first):
        assert part.evaluate(CONTRAST) >= 4.5  # WCAG 2.2's level AA for text


# The contrast of an element's text and what is behind it, as WCAG 2.2 defines it.
CONTRAST = """element => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  let layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  const behind = layers.reduce(
    (under, [r, g, b, a = 1]) => [r, g, b].map((over, i) => over * a + under[i] * (1 - a)), [255, 255, 255]);
  const luminance = rgb => rgb.map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const [low, high] = [luminance(parse(getComputedStyle(element).color).slice(0, 3)), luminance(behind)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""
