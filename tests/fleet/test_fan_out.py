import asyncio

from rtk.fleet.fan_out import LoopCap


def test_a_cap_forgets_loops_that_are_gone():
    cap = LoopCap(1)

    async def contend():
        async def hold():
            async with cap.here():
                await asyncio.sleep(0)

        await asyncio.gather(hold(), hold(), hold())

    for _ in range(3):
        asyncio.run(contend())
    assert len(cap._by_loop) == 1
