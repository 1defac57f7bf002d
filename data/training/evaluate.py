"""Measure what the tiny model's experts do on held-out text, domain by domain.

    python data/training/evaluate.py CORPUS_DIR MODEL_DIR

Writes MODEL_DIR/usage_by_domain.csv, with one line a layer, expert and domain: the share of that
layer's assignments in that domain which the expert gets (an even load is 1/experts). Prints, per layer,
the held-out loss and how far two domains differ, as total variation distance of their loads: 0 for the
same load, 1 for no expert in common.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from train import DOMAINS, SEQUENCE, held_out_loss, split_tokens
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from rtk import ModelLayout, RouteTrace, usage

SEQUENCES = 16


@torch.no_grad()
def held_out_traces(
    model: Qwen3MoeForCausalLM, tokens: np.ndarray, layout: ModelLayout, domain: str
) -> list[RouteTrace]:
    """Routes of whole forward passes over the first held-out sequences."""
    traces = []
    for start in range(0, min(SEQUENCES, len(tokens) // SEQUENCE) * SEQUENCE, SEQUENCE):
        ids = tokens[start : start + SEQUENCE].astype(np.int64)
        logits = model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits
        routes = np.zeros((len(ids), layout.num_layers, layout.top_k), np.uint8)
        for layer, scores in zip(layout.moe_layers, logits, strict=True):
            routes[:, layer] = scores.topk(layout.top_k, dim=-1).indices.numpy()
        text = ("",) * len(ids)
        traces.append(RouteTrace(ids, text, len(ids), routes, layout, source={"domain": domain}))
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("model", type=Path)
    options = parser.parse_args()
    model = Qwen3MoeForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    layout = ModelLayout.from_config(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    _, held_out = split_tokens(options.corpus, tokenizer.backend_tokenizer)

    loads, lines = {}, []
    for domain in DOMAINS:
        print(f"{domain:12} held-out loss {held_out_loss(model, held_out[domain]):.3f} nats a token")
        load = usage.counts(held_out_traces(model, held_out[domain], layout, domain))
        loads[domain] = load / load.sum(axis=1, keepdims=True)
        for i, layer in enumerate(layout.moe_layers):
            lines += [(layer, expert, domain, share) for expert, share in enumerate(loads[domain][i])]
    shares = pd.DataFrame(lines, columns=["layer", "expert", "domain", "share"])
    shares = shares.pivot(index=["layer", "expert"], columns="domain", values="share")[list(DOMAINS)]
    shares.to_csv(options.model / "usage_by_domain.csv", float_format="%.4f")

    distance = pd.DataFrame(
        {
            f"{a} / {b}": abs(loads[a] - loads[b]).sum(axis=1) / 2
            for a, b in itertools.combinations(DOMAINS, 2)
        },
        index=pd.Index(layout.moe_layers, name="layer"),
    )
    print("\nTotal variation distance of two domains' loads:\n")
    print(distance.round(2).to_string())


if __name__ == "__main__":
    main()
