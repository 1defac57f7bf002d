import asyncio
import os
import threading
import time

import pytest

from rtk import RemoteInferenceGenerator, loops
from rtk.errors import LoopError
from rtk.loops import LoopThread, Relay
from tests.stub import serving, text


async def thread_name():
    return threading.current_thread().name


def test_runs_on_one_background_thread_from_anywhere():
    async def inside():
        return loops.background.run(thread_name()), await loops.background.arun(thread_name())

    assert loops.background.run(thread_name()) == "rtk-loop"
    assert asyncio.run(inside()) == ("rtk-loop", "rtk-loop")


def test_errors_come_through_as_they_are():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        loops.background.run(fail())
    with pytest.raises(KeyError, match="x"):
        asyncio.run(loops.background.arun(fail()))


def test_a_call_that_would_wait_for_itself_is_refused():
    async def nested():
        return loops.background.run(thread_name())

    async def nested_relay():
        return loops.Relay().run(loops.background, thread_name(), print)

    for work in (nested, nested_relay):
        with pytest.raises(LoopError, match="awaitable form"):
            loops.background.run(work())


def test_cancelling_the_awaiter_cancels_the_work():
    began, cancelled = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def run():
        task = asyncio.create_task(loops.background.arun(work()))
        assert await asyncio.to_thread(began.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert cancelled.wait(30)


def test_events_arrive_in_order_in_the_callers_thread():
    relay = loops.Relay()
    seen = []

    async def work():
        for number in range(100):
            relay.send(number)
        return "done"

    result = relay.run(loops.background, work(), lambda n: seen.append((n, threading.current_thread())))
    assert result == "done"
    assert seen == [(n, threading.main_thread()) for n in range(100)]


def test_a_failing_callback_cancels_the_work():
    relay = loops.Relay()
    cancelled = threading.Event()

    async def work():
        relay.send(1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def fail(_):
        raise ValueError("display is gone")

    with pytest.raises(ValueError, match="display is gone"):
        relay.run(loops.background, work(), fail)
    assert cancelled.wait(10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_a_thread_of_its_own():
    loops.background.run(thread_name())
    child = fork(lambda: loops.background.run(thread_name()) == "rtk-loop")
    assert exit_status(child) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_connections_alone():
    async def run():
        async with serving(text('{"data": []}')) as stub:
            generator = RemoteInferenceGenerator(stub.url)

            def ask():
                return generator.request("GET", "/v1/models")

            async def ask_here():
                async with asyncio.timeout(30):
                    return await loops.background.arun(ask())

            assert await ask_here() == {"data": []}
            child = fork(lambda: loops.background.run(ask()) == {"data": []})
            assert await asyncio.to_thread(exit_status, child) == 0
            # The connection from before the fork is still open, and is used again.
            assert await ask_here() == {"data": []}
            await loops.background.arun(generator.aclose())

    asyncio.run(run())


def fork(work):
    """Run `work` in a child process, whose exit status is 0 where it returned True."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return child


def exit_status(child):
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the forked child hangs")
    return os.waitstatus_to_exitcode(done[1])


@pytest.mark.parametrize("relayed", [False, True])
def test_an_interrupt_before_the_future_is_there_cancels_the_work(relayed):
    """The request may be on its way before the caller has anything in hand to cancel it by."""
    loop, begun, ended = LoopThread(), threading.Event(), threading.Event()

    async def work():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    submit = loop.submit

    def interrupted(coroutine):
        submit(coroutine)
        assert begun.wait(10)
        raise KeyboardInterrupt

    loop.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        if relayed:
            Relay().run(loop, work(), print)
        else:
            loop.run(work())
    assert ended.wait(10)
