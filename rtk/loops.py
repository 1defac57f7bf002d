"""Plain blocking calls that work inside a notebook's running event loop.

A notebook cell runs inside the kernel's event loop, where `asyncio.run` is refused. So requests run on a
loop of their own, in one background thread of the process; the kernel's loop is never touched.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rtk.errors import LoopError
from rtk.extras import need

T = TypeVar("T")
E = TypeVar("E")

_WAKE_UP_S = 0.2
# The default, epoll, keeps its list of sockets in the kernel, shared by parent and forked child: a child that
# drops its copies of the parent's connections would take them off the parent's list too, and the parent
# would wait forever. poll's list is this process's own. Windows has neither fork nor poll.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class _Work(Generic[T]):
    """A coroutine that can be cancelled from the moment it is made, before anybody holds its future.

    A KeyboardInterrupt may come between handing it over and getting the future back, while the request is
    already on its way.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    async def run(self) -> T:
        self._task = asyncio.current_task()
        if self._cancelled:
            self._work.close()
            raise asyncio.CancelledError
        return await self._work

    def cancel(self) -> None:
        """Called on the loop that runs it."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """A private event loop in a daemon thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid: int | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop. Cancelling the future cancels the coroutine's task."""
        return asyncio.run_coroutine_threadsafe(work, self._running_loop())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until the coroutine is done; a KeyboardInterrupt cancels it first, then goes on.

        Raises:
            LoopError: called from the loop's own thread, where it would wait for itself forever.
        """
        if self.is_current():
            work.close()
            raise LoopError(
                "a blocking rtk call was made on rtk's own loop, from inside one of its callbacks; "
                "use the awaitable form there"
            )
        cancellable = _Work(work)
        try:
            return self.submit(cancellable.run()).result()
        except BaseException:
            self.call(cancellable.cancel)
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon."""
        self._running_loop().call_soon_threadsafe(function)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on the private loop, from any other one."""
        future = asyncio.wrap_future(self.submit(work))
        try:
            while not future.done():
                # ipykernel's interrupt cancels the cell's task without waking its loop, which has nothing
                # else to wake it while all the traffic is on this one.
                await asyncio.wait([future], timeout=_WAKE_UP_S)
            return future.result()
        finally:
            future.cancel()

    def is_current(self) -> bool:
        """Whether the caller already is on this loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # Threads do not survive a fork; a child process gets a thread of its own.
            if self._loop is None or self._pid != os.getpid():
                self._loop = asyncio.SelectorEventLoop(_Selector())
                self._pid = os.getpid()
                threading.Thread(target=self._loop.run_forever, name="rtk-loop", daemon=True).start()
            return self._loop


class Relay(Generic[E]):
    """Carries events from the private loop to a blocked caller, so that callbacks run in its thread.

    Widgets and progress displays must be touched from the thread that owns them, never from the loop's.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[E | concurrent.futures.Future[Any]] = queue.SimpleQueue()

    def send(self, event: E) -> None:
        """Hand over one event; called on the private loop."""
        self._events.put(event)

    def run(self, loop: LoopThread, work: Coroutine[Any, Any, T], on_event: Callable[[E], None]) -> T:
        """As `LoopThread.run`, calling on_event for each event in order until the work is done."""
        if loop.is_current():
            return loop.run(work)  # raises
        cancellable = _Work(work)
        try:
            future = loop.submit(cancellable.run())
            future.add_done_callback(self._events.put)
            while not isinstance(event := self._events.get(), concurrent.futures.Future):
                on_event(event)
            return future.result()
        except BaseException:
            loop.call(cancellable.cancel)
            raise


#: The process's one background loop.
background = LoopThread()


def allow_nested_loops() -> None:
    """Let `asyncio.run` and `run_until_complete` work in notebook cells, for code that insists on them.

    rtk itself does not need it. It applies nest-asyncio2, the maintained continuation of nest-asyncio; a
    loop that either of them has already patched is left as it is.

    Raises:
        LoopError: the running loop is uvloop's, which cannot be patched.
        MissingPackage: nest-asyncio2 is not installed.
    """
    need("nest_asyncio2", "rtk.allow_nested_loops")
    import nest_asyncio2

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if loop is not None and getattr(loop, "_nest_patched", False):
        return
    try:
        nest_asyncio2.apply(loop)
    except ValueError as error:
        raise LoopError(f"{error}. Start the kernel with asyncio's own loop instead of uvloop") from error
