"""Routes of the tiny model on engines that truly differ: transformers in float32, in bfloat16 and with other weights, a
server's, and megatron-core's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache

import numpy as np

import rtk
from rtk import ModelLayout, RouteTrace
from rtk.serve import shipped


@cache
def load(dtype: str, noise: float = 0.0):
    """The tiny model; `noise` adds that share of each weight matrix's own spread, as an update would."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        shipped.find("tiny_moe"), dtype=getattr(torch, dtype)
    ).eval()
    if noise:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return model


@cache
def texts(tokens: int = 200) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Prompt length and token ids of one sampled text a prompt."""
    import torch
    import transformers

    model = load("float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shipped.find("tiny_moe"))
    prompts = [p for group in json.loads(shipped.find("prompts.json").read_text()).values() for p in group]
    sampled = []
    for number, prompt in enumerate(prompts):
        torch.manual_seed(number)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(ids, do_sample=True, max_new_tokens=tokens, top_k=0, pad_token_id=0)
        sampled.append((ids.shape[1], tuple(whole[0].tolist())))
    return tuple(sampled)


@cache
def traces(dtype: str, noise: float = 0.0) -> tuple[RouteTrace, ...]:
    """One trace a text, with the logprobs of the generated tokens, of one forward pass."""
    import torch

    model = load(dtype, noise)
    layout = ModelLayout.from_config(shipped.find("tiny_moe"))
    made = []
    for prompt, ids in texts():
        with torch.no_grad():
            output = model(torch.tensor([ids[:-1]]), output_router_logits=True, use_cache=False)
        routes = np.zeros((len(ids) - 1, layout.num_layers, layout.top_k), np.uint8)
        for layer, logits in zip(layout.moe_layers, output.router_logits, strict=True):
            routes[:, layer] = logits.float().topk(layout.top_k).indices.numpy()
        log_p = output.logits[0].float().log_softmax(-1)
        logprobs = log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])][prompt - 1 :].numpy()
        made.append(RouteTrace(np.array(ids), ("x",) * len(ids), prompt, routes, layout, logprobs=logprobs))
    return tuple(made)


def rollout(url: str, max_tokens: int = 120) -> list[RouteTrace]:
    """One text a prompt of the tiny model, sampled by a server."""
    with rtk.connect(url) as session:
        return [
            session.sample(text, max_tokens=max_tokens, temperature=1.0, seed=seed).trace
            for seed, text in enumerate(text for texts in shipped.prompts().values() for text in texts)
        ]


def by_megatron(traces: Sequence[RouteTrace]) -> list[RouteTrace]:
    """The same tokens with the experts that real megatron-core routers choose for them, and their logprobs, in float32."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from rtk.replay import megatron
    from rtk.replay.live import cpu_stand_ins
    from rtk.replay.live.stage import Stage

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        cpu_stand_ins.apply()
    stage = Stage(shipped.find("tiny_moe"))
    chosen = []
    for trace in traces:
        inputs = torch.from_numpy(trace.token_ids[: trace.rows].astype(np.int64))
        with megatron.recording(stage.chunks) as recorded:
            log_p = stage.forward(inputs).log_softmax(-1).numpy()
        made = np.arange(trace.prompt_tokens, len(trace.token_ids))
        routes = np.zeros_like(trace.routed_experts)
        for number, ids in recorded.items():
            routes[:, number - 1] = ids.numpy()
        logprobs = log_p[made - 1, trace.token_ids[made]]
        chosen.append(dataclasses.replace(trace, routed_experts=routes, logprobs=logprobs))
    if alone:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return chosen
