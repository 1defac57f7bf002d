"""Train the tiny Mixture-of-Experts model, from text files to a folder that vLLM can serve.

    python data/training/train.py CORPUS_DIR OUT_DIR [--minutes 45]

CORPUS_DIR is what corpus.py wrote. OUT_DIR receives config.json, model.safetensors (bfloat16),
the tokenizer and training.json (the seed, the loss curve and how long it took).

Each sequence holds one domain only and each batch holds all four alike, so that an expert can
specialise in a domain and the load of a batch can still be even. The load-balancing loss is the
one of Switch Transformers (arXiv 2101.03961, eq. 4), taken per layer: transformers' own version
pools all layers first, which lets an expert of one layer starve while its namesakes are busy.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END_OF_TEXT = "<|endoftext|>"
DOMAINS = ("english", "french", "python", "arithmetic")
SEED = 2510
VOCABULARY = 4096
SEQUENCE = 256
SEQUENCES_PER_DOMAIN = 2
BALANCE_WEIGHT = 0.01
PEAK_LEARNING_RATE = 2e-3
HELD_OUT = 0.02


def train_tokenizer(corpus: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Single digits, so that arithmetic can be learnt column by column.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The same amount of every language, or the largest file would take most of the vocabulary.
    texts = [(corpus / f"{name}.txt").read_text(encoding="utf-8")[:1_100_000] for name in DOMAINS]
    tokenizer.train_from_iterator([t for text in texts for t in text.split(END_OF_TEXT)], trainer)
    return tokenizer


def model_config(tokenizer: Tokenizer) -> Qwen3MoeConfig:
    end = tokenizer.token_to_id(END_OF_TEXT)
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        mlp_only_layers=[0],  # the first layer is dense, as in DeepSeek-V3 and Moonlight
        decoder_sparse_step=1,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        rope_theta=10_000.0,
    )


def balance_loss(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """experts * sum_i(share of assignments i gets * mean probability of i); 1 when even."""
    probabilities = router_logits.float().softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    experts = router_logits.shape[-1]
    share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (share * probabilities.mean(0)).sum()


def split_tokens(corpus: Path, tokenizer: Tokenizer) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Each domain's tokens as uint16, to train on and held out; each document ends with the end mark."""
    training, held_out = {}, {}
    end = tokenizer.token_to_id(END_OF_TEXT)
    for name in DOMAINS:
        documents = (corpus / f"{name}.txt").read_text(encoding="utf-8").split(END_OF_TEXT)
        encoded = tokenizer.encode_batch(documents)
        tokens = np.concatenate([np.array([*e.ids, end], dtype=np.uint16) for e in encoded])
        cut = int(len(tokens) * (1 - HELD_OUT))
        training[name], held_out[name] = tokens[:cut], tokens[cut:]
        print(f"{name:12} {len(tokens):10,} tokens", flush=True)
    return training, held_out


def learning_rate(progress: float) -> float:
    """Linear warm-up over the first 4 percent, then a cosine to a twentieth of the peak."""
    if progress < 0.04:
        return PEAK_LEARNING_RATE * max(progress / 0.04, 0.02)
    turn = (progress - 0.04) / 0.96
    return PEAK_LEARNING_RATE * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(turn, 1.0))))


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, tokens: np.ndarray) -> float:
    """Mean next-token loss in nats over up to 16 held-out sequences."""
    count = min(16, len(tokens) // SEQUENCE)
    batch = torch.from_numpy(tokens[: count * SEQUENCE].astype(np.int64)).view(count, SEQUENCE)
    return float(model(batch, labels=batch).loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=45.0)
    options = parser.parse_args()

    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    tokenizer = train_tokenizer(options.corpus)
    config = model_config(tokenizer)
    model = Qwen3MoeForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    training, held_out = split_tokens(options.corpus, tokenizer)

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    begin, step, curve = time.monotonic(), 0, []
    model.train()
    while (progress := (time.monotonic() - begin) / (options.minutes * 60)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        rows = []
        for name in DOMAINS:
            starts = rng.integers(0, len(training[name]) - SEQUENCE, SEQUENCES_PER_DOMAIN)
            rows += [training[name][s : s + SEQUENCE] for s in starts]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        output = model(batch, output_router_logits=True, use_cache=False)
        language = torch.nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        balance = torch.stack(
            [balance_loss(logits, config.num_experts_per_tok) for logits in output.router_logits]
        ).mean()
        (language + BALANCE_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            minutes = (time.monotonic() - begin) / 60
            curve.append((step, round(language.item(), 4), round(balance.item(), 4)))
            print(
                f"{minutes:6.1f} min  step {step:5}  loss {language.item():.3f}  "
                f"balance {balance.item():.3f}",
                flush=True,
            )

    model.eval()
    losses = {name: round(held_out_loss(model, held_out[name]), 4) for name in DOMAINS}
    print("held-out loss, nats a token:", losses)
    options.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(options.out)
    record = {
        "seed": SEED,
        "minutes": options.minutes,
        "threads": torch.get_num_threads(),
        "steps": step,
        "tokens": step * len(DOMAINS) * SEQUENCES_PER_DOMAIN * SEQUENCE,
        "balance_weight": BALANCE_WEIGHT,
        "held_out_loss_nats": losses,
        "curve_step_loss_balance": curve,
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
