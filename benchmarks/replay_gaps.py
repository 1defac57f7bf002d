"""How far Megatron's logprobs are from the rollout's, with and without replay, in each layout that needs no GPU.

    python -m benchmarks.replay_gaps [--url URL] [--max-tokens 48]

Prints the table of docs/replay-live.md. The tiny model writes; URL is a vLLM that serves it, and without one the
embedded server does. Then real megatron-core ranks, on gloo, forward the same tokens: once with the experts that
they choose for themselves, once with those of the rollout.
"""

from __future__ import annotations

import argparse

import numpy as np

import rtk
from rtk import RouteTrace
from rtk.replay import StageResult, verify
from rtk.serve import shipped

LAYOUTS = {
    "one rank": {"pipeline_size": 1},
    "PP=2": {"pipeline_size": 2},
    "PP=2, VPP=2": {"pipeline_size": 2, "virtual_size": 2},
    "PP=4, VPP=2": {"pipeline_size": 4, "virtual_size": 2},
    "EP=2": {"pipeline_size": 1, "expert_size": 2},
    "PP=2, EP=2": {"pipeline_size": 2, "expert_size": 2},
}


def rollout(url: str, max_tokens: int) -> list[RouteTrace]:
    with rtk.connect(url) as session:
        return [
            session.sample(text, max_tokens=max_tokens, temperature=0.8, seed=seed).trace
            for texts in shipped.prompts().values()
            for seed, text in enumerate(texts)
        ]


def row(name: str, results: list[StageResult], traces: list[RouteTrace]) -> str:
    experts = 1 + max(each.expert_rank for each in results)
    last = [each for each in results if each.logprob_gap is not None]
    # Ranks of an expert-parallel group have traces of their own: weigh each by its generated tokens.
    weights = [
        sum(len(trace.token_ids) - trace.prompt_tokens for trace in traces[each.expert_rank :: experts])
        - each.floored
        for each in last
    ]
    own = np.average([each.logprob_gap for each in last], weights=weights)
    replayed = np.average([each.logprob_gap_replayed for each in last], weights=weights)
    lowest = min(share for each in results for share in each.agreement)
    honoured = "yes" if all(each.replay_honoured for each in results) else "NO"
    return f"| {name} | {len(results)} | {lowest:.2%} | {honoured} | {own:.2e} | {replayed:.2e} |"


def table(traces: list[RouteTrace]) -> None:
    generated = sum(len(trace.token_ids) - trace.prompt_tokens for trace in traces)
    print(f"{len(traces)} traces, {sum(trace.rows for trace in traces)} rows, {generated} generated tokens\n")
    print("| layout | ranks | lowest agreement of a layer | replay honoured | gap by itself | gap replayed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, sizes in LAYOUTS.items():
        results = verify(shipped.find("tiny_moe"), traces, timeout_s=600, **sizes)
        print(row(name, results, traces), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a vLLM that serves the tiny model")
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()
    if arguments.url:
        table(rollout(arguments.url, arguments.max_tokens))
        return
    with rtk.serve.embedded(max_model_len=512) as server:
        traces = rollout(server.url, arguments.max_tokens)
    table(traces)


if __name__ == "__main__":
    main()
