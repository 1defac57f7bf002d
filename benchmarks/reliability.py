"""Thousands of requests through the proxy that damages answers; what came of each, counted.

python benchmarks/reliability.py [seed]

Ends with status 1 where an answer was lost, doubled or wrong without being counted as damage that HTTP cannot show.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rtk
from rtk import RemoteGenerateResult, RemoteInferenceGenerator, RetryPolicy
from rtk.errors import RtkError
from rtk.trace import plausible
from tests.reliability.oracle import LAYOUT, answering, truth
from tests.reliability.proxy import DAMAGED, HARMLESS, TURNED_AWAY, Record, proxying, script

MAX_TOKENS = 16
PARAMS = {"max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0}
PASSING = ("hang_up", "cut_head", "cut_body", "truncate", "html_200", "html_503")
PATIENT = RetryPolicy(tries=100, wait_s=0.005)
CONCURRENCY = 32
PHASE_TIMEOUT_S = 300

Outcomes = dict[tuple[int, ...], RemoteGenerateResult | Exception]


def prompts(count: int) -> list[list[int]]:
    return [[number, *range(100, 159)] for number in range(count)]


async def ask_all(
    url: str, asked: Sequence[Sequence[int]], *, stream: bool = False, retry: RetryPolicy = PATIENT
) -> Outcomes:
    outcomes: Outcomes = {}
    waiting = iter(asked)
    async with RemoteInferenceGenerator(url, retry=retry) as generator:

        async def worker() -> None:
            for prompt in waiting:
                try:
                    outcomes[tuple(prompt)] = await generator.generate(
                        prompt, PARAMS, routed_experts=True, on_chunk=(lambda _: None) if stream else None
                    )
                except Exception as error:
                    outcomes[tuple(prompt)] = error

        await asyncio.wait_for(asyncio.gather(*(worker() for _ in range(CONCURRENCY))), PHASE_TIMEOUT_S)
    return outcomes


async def phase(
    name: str, weights: Mapping[str, float], count: int, seed: int, *, stream: bool = False
) -> tuple[Outcomes, dict[Any, list[str]]]:
    begin = time.perf_counter()
    async with answering() as server, proxying(server, script(seed, weights)) as proxy:
        outcomes = await ask_all(proxy.url, prompts(count), stream=stream)
        records: list[Record] = proxy.records
    of_prompt: dict[Any, list[str]] = defaultdict(list)
    for record in records:
        of_prompt[record.prompt].append(record.fault.kind)
    kinds = Counter(judge(prompt, outcome) for prompt, outcome in outcomes.items())
    unexpected = [o for o in outcomes.values() if isinstance(o, Exception) and not isinstance(o, RtkError)]
    require(not unexpected, f"{name}: other errors than the documented ones: {unexpected[:3]}")
    require(len(outcomes) == count, f"{name}: {count - len(outcomes)} prompts without an outcome")
    faults = sum(record.fault.kind not in HARMLESS for record in records)
    print(
        f"{name}: {count} prompts, {len(records)} requests, {faults} faults, {time.perf_counter() - begin:.0f} s\n    "
        + ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()),
        flush=True,
    )
    return outcomes, of_prompt


def judge(prompt: tuple[int, ...], outcome: RemoteGenerateResult | Exception) -> str:
    if isinstance(outcome, Exception):
        return type(outcome).__name__
    differences = truth(prompt, MAX_TOKENS).differences(outcome)
    return "right" if not differences else f"wrong {' and '.join(sorted(differences))}"


def require(condition: bool, complaint: str) -> None:
    if not condition:
        sys.exit(complaint)


async def passing(seed: int) -> None:
    weights = dict.fromkeys(PASSING, 1) | {"none": 6, "delay": 2, "stale": 2, "drip": 0.2}
    outcomes, of_prompt = await phase("faults that pass", weights, 3000, seed)
    require(all(judge(p, o) == "right" for p, o in outcomes.items()), "a fault that passes was not survived")
    doubled = [kinds for kinds in of_prompt.values() if set(kinds[:-1]) & set(HARMLESS)]
    require(not doubled, f"sent again after an answer had arrived: {doubled[:3]}")


async def restarts(seed: int) -> None:
    outcomes, of_prompt = await phase("restarts", {"none": 60, "restart": 1}, 2000, seed)
    require(all(judge(p, o) == "right" for p, o in outcomes.items()), "a restart was not survived")
    print(f"    {sum(kinds.count('restart') for kinds in of_prompt.values())} restarts")


async def streams(seed: int) -> None:
    weights = dict.fromkeys([*PASSING, "429", "500", "503", "stale"], 1) | {"none": 8, "drip": 0.2}
    outcomes, of_prompt = await phase("streams", weights, 2000, seed, stream=True)
    for prompt, outcome in outcomes.items():
        fine = of_prompt[prompt][-1] in HARMLESS
        require(fine == (judge(prompt, outcome) == "right"), f"{of_prompt[prompt]} gave {outcome!r:.200}")


async def damage(seed: int) -> None:
    """One turned bit in each answer: how much HTTP and the decoders see, and how much the routes' own rules."""
    for stream in (False, True):
        name = "one turned bit in each " + ("stream" if stream else "answer")
        outcomes, of_prompt = await phase(name, {"corrupt": 1}, 2000, seed, stream=stream)
        wrong = {p: o for p, o in outcomes.items() if judge(p, o).startswith("wrong")}
        again = sum(len(kinds) > 1 for kinds in of_prompt.values())
        routes = [o for p, o in wrong.items() if "routed_experts" in judge(p, o)]
        seen = sum(implausible(o) for o in routes)
        print(
            f"    {again} sent again since the JSON was broken; of {len(routes)} wrong routes, {seen} are implausible"
        )
        for prompt, outcome in wrong.items():
            differences = truth(prompt, MAX_TOKENS).differences(outcome)
            small = differences.get("routed_experts", 0) <= 2 and differences.get("token_ids", 0) <= 1
            require(small and len(differences) == 1, f"more than one wrong value: {differences}")


def implausible(result: RemoteGenerateResult) -> bool:
    assert result.routed_experts is not None
    moe = result.routed_experts[:, list(LAYOUT.moe_layers)]
    flags = plausible.out_of_range(moe, LAYOUT.num_experts) | plausible.repeated_experts(moe)
    return bool(flags.any() or result.routed_experts[:, 0].any())


async def flat(seed: int) -> None:
    """Memory and descriptors of this process, the proxy and the server in it, round after round."""
    weights = dict.fromkeys([*TURNED_AWAY, *DAMAGED, *HARMLESS], 1.0) | {
        "none": 20,
        "restart": 0.2,
        "drip": 0.1,
    }
    rounds = []
    async with answering() as server, proxying(server, script(seed, weights)) as proxy:
        for number in range(8):
            await ask_all(proxy.url, prompts(500), stream=bool(number % 2), retry=RetryPolicy(6, 0.005))
            proxy.records.clear()
            gc.collect()
            await asyncio.sleep(0.5)
            rounds.append((rss(), len(os.listdir("/proc/self/fd"))))
    print("every fault: 8 rounds of 500 prompts; resident MB and open files after each round")
    print("    " + ", ".join(f"{memory / 2**20:.1f} MB {files}" for memory, files in rounds))
    require(rounds[-1][0] - rounds[3][0] < 4 * 2**20, "memory grew")
    require(rounds[-1][1] <= rounds[1][1] + 2, "descriptors were left open")


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def real_restart() -> None:
    """The embedded server killed and started again on its port, while greedy requests go on."""
    asked = [[ord(letter) for letter in f"def f{number}(x):"] for number in range(40)]
    with rtk.serve.embedded(max_model_len=128) as server:
        url, port = server.url, int(server.url.rsplit(":", 1)[1])
        direct = await ask_all(url, asked)
        begin = time.perf_counter()
        asking = asyncio.create_task(ask_all(url, asked, retry=RetryPolicy(tries=60, wait_s=1.0)))
        await asyncio.sleep(random.uniform(0.05, 0.3))
        server._process.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.5)
        require(not asking.done(), "the server was killed too late to matter")
    with await asyncio.to_thread(rtk.serve.embedded, port=port, max_model_len=128):
        through = await asking
    for prompt, outcome in direct.items():
        after = through[prompt]
        require(
            isinstance(outcome, RemoteGenerateResult)
            and isinstance(after, RemoteGenerateResult)
            and after.token_ids == outcome.token_ids
            and bool((after.routed_experts == outcome.routed_experts).all()),
            f"{prompt}: {after!r:.200}",
        )
    print(
        f"the embedded server, killed under {len(asked)} requests and started again: {len(through)} right, "
        f"{time.perf_counter() - begin:.0f} s"
    )


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for work in (passing, restarts, streams, damage, flat):
        asyncio.run(work(seed))
    asyncio.run(real_restart())


if __name__ == "__main__":
    main()
