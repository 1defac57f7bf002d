"""rtk in a real Jupyter kernel, whose cells run inside the kernel's own event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.stub import serving, text

pytestmark = pytest.mark.kernel
manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client and ipykernel")
pytest.importorskip("ipykernel", reason="needs ipykernel")

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120


class Kernel:
    """A running kernel and one client of it."""

    def __init__(self) -> None:
        self.manager, self.client = manager.start_new_kernel(kernel_name="python3", cwd=str(ROOT))

    def start(self, code: str) -> str:
        """Send a cell; return its message id."""
        message: str = self.client.execute(code)
        return message

    def finish(self, message: str) -> tuple[str, str]:
        """Wait for a cell; return what it printed, and the error's name or an empty text."""
        printed, error = "", ""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                reply = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"the cell did not end within {TIMEOUT_S} s; it printed {printed!r}")
            if reply["parent_header"].get("msg_id") != message:
                continue
            content = reply["content"]
            if reply["msg_type"] == "stream":
                printed += content["text"]
            elif reply["msg_type"] == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif reply["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed.strip(), error

    def run(self, code: str) -> str:
        """Run a cell that must not fail; return what it printed."""
        printed, error = self.finish(self.start(code))
        assert not error, error
        return printed

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(embedded_server) -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        kernel.run(f"import asyncio, rtk\nsession = rtk.connect({embedded_server.url!r})")
        yield kernel
    finally:
        kernel.close()


SAMPLE = "session.sample([5, 6, 7], max_tokens=4, temperature=0).result.token_ids"
ASAMPLE = "(await session.asample([5, 6, 7], max_tokens=4, temperature=0)).result.token_ids"


def test_plain_calls_and_await_in_cells(kernel):
    plain = kernel.run(f"print({SAMPLE})")
    assert plain.startswith("[")
    assert kernel.run(f"print({ASAMPLE})") == plain


def test_both_in_a_widgets_callback(kernel):
    printed = kernel.run(
        "import ipywidgets\n"
        "seen = []\n"
        "async def later():\n"
        f"    seen.append({ASAMPLE})\n"
        "def clicked(_):\n"
        f"    seen.append({SAMPLE})\n"
        "    task = asyncio.get_running_loop().create_task(later())\n"
        "    seen.append(task)\n"
        "button = ipywidgets.Button()\n"
        "button.on_click(clicked)\n"
        "button.click()\n"
        "await seen[1]\n"
        "print(seen[0] == seen[2])"
    )
    assert printed == "True"


def test_a_batch_with_its_bar_in_a_cell_awaited_and_in_a_callback(kernel):
    printed = kernel.run(
        "import ipywidgets\n"
        "many = lambda: session.sample_many([[5, 6, 7], [8, 9]], n=2, max_tokens=2, seed=1)\n"
        "tokens = lambda samples: [s.result.token_ids for s in samples]\n"
        "plain = tokens(many())\n"
        "awaited = await session.asample_many([[5, 6, 7], [8, 9]], n=2, max_tokens=2, seed=1)\n"
        "button, clicked = ipywidgets.Button(), []\n"
        "button.on_click(lambda _: clicked.append(tokens(many())))\n"
        "button.click()\n"
        "print(len(plain), tokens(awaited) == plain, clicked == [plain])"
    )
    assert printed.endswith("4 True True")


def test_many_at_once(kernel):
    printed = kernel.run(
        "samples = await asyncio.gather(*(session.asample([5, 6, 7], max_tokens=2) for _ in range(50)))\n"
        "print(len([s for s in samples if s.trace.rows == 2 + len(s.result.token_ids)]))"
    )
    assert printed == "50"


def test_text_comes_in_on_the_main_thread(kernel):
    printed = kernel.run(
        "import threading\n"
        "threads = set()\n"
        "note = lambda text: threads.add(threading.current_thread() is threading.main_thread())\n"
        "_ = session.sample([5, 6, 7], max_tokens=4, on_text=note)\n"
        "_ = await session.asample([5, 6, 7], max_tokens=4, on_text=note)\n"
        "print(threads)"
    )
    assert printed == "{True}"


@pytest.mark.parametrize(
    "call",
    [
        "silent.sample([5, 6, 7])",
        "silent.sample([5, 6, 7], on_text=print)",
        "await silent.asample([5, 6, 7])",
    ],
)
def test_an_interrupt_cancels_the_request_and_the_kernel_goes_on(kernel, silent_server, call):
    url, asked, gone = silent_server
    kernel.run(f"silent = rtk.connect({url!r}, layout=session.layout, server='vllm')")
    cell = kernel.start(f"{call}\nprint('ended')")
    assert asked.wait(TIMEOUT_S)
    kernel.manager.interrupt_kernel()
    printed, error = kernel.finish(cell)
    assert printed == ""
    assert error.startswith(("KeyboardInterrupt", "CancelledError"))
    assert gone.wait(TIMEOUT_S)
    assert kernel.run(f"print({SAMPLE})").startswith("[")


@pytest.fixture
def silent_server() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A server that never answers a generate request, and notes when one came and when its client left."""
    asked, gone = threading.Event(), threading.Event()
    started: queue.SimpleQueue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def answer(request: web.Request) -> web.StreamResponse:
        if not request.path.endswith("/generate"):
            return await text('{"data": [{"id": "m"}]}')(request)
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        raise AssertionError("nothing ends the wait but a cancellation")

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(answer) as stub:
            started.put((stub.url, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, loop, stop = started.get(timeout=TIMEOUT_S)
    yield url, asked, gone
    loop.call_soon_threadsafe(stop.set)
    thread.join()


@pytest.mark.parametrize("patched_before", ["", "nest_asyncio", "nest_asyncio2"])
def test_allow_nested_loops(embedded_server, patched_before):
    if patched_before:
        pytest.importorskip(patched_before, reason=f"{patched_before} is not installed")
    kernel = Kernel()
    try:
        kernel.run(
            f"import asyncio, rtk\nsession = rtk.connect({embedded_server.url!r})\nasync def one(): return 1"
        )
        _, error = kernel.finish(kernel.start("asyncio.run(one())"))
        assert "cannot be called from a running event loop" in error
        if patched_before:
            kernel.run(f"import {patched_before}\n{patched_before}.apply()")
        kernel.run("rtk.allow_nested_loops()\nrtk.allow_nested_loops()")
        assert kernel.run("print(asyncio.run(one()))") == "1"
        plain = kernel.run(f"print({SAMPLE})")
        assert plain.startswith("[")
        assert kernel.run(f"print({ASAMPLE})") == plain
        nested = "asyncio.run(session.asample([5, 6, 7], max_tokens=4, temperature=0)).result.token_ids"
        assert kernel.run(f"print({nested})") == plain
    finally:
        kernel.close()
