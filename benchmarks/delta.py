"""What a version of weights costs as a delta, of a model that is really trained.

    python benchmarks/delta.py [--steps 60] [--last 10] [--rounds 5] [--json]

A Qwen3 of 25 M parameters spells words backwards. A supervised warm start (kept in the cache directory) gets
about half of the letters right. From there the project's own trainer makes RL steps (GRPO, AdamW, float32
masters): each with 4 prompts of 8 completions, which the model samples with the weights of the version
before. The reward is the share of letters in their places. Every version is published in bfloat16.
Figures are of the `--last` pairs of consecutive versions; after a few steps AdamW's moments have warmed up.

smaller   bytes of a version over those of its delta, all of them: heads and checksums too
density   share of the elements whose bits changed
encode    raw bytes over CPU time of the one thread that encodes, in chunks of 1 MiB; the best of `--rounds`
decode    the same, to apply the delta
first     `smaller` for the first pair: of versions 0 and 1, with AdamW's moments still empty
float32   `smaller` for the last pair, were the masters published
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import kept_directory, medians, parser_of, report, say, sized, table

from millrace.weights.delta_coding import apply, encode, kind_of

RATES = (1e-6, 1e-5)
CHUNK_BYTES = 1 << 20
WARM_STEPS, WARM_LR, WARM_TOKENS = sized(60, 2), 1e-3, 600
PROMPTS, GROUP_SIZE, LETTERS = 4, 8, 5
MODEL = {
    "hidden_size": sized(512, 64),
    "intermediate_size": sized(1536, 128),
    "num_hidden_layers": sized(8, 2),
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


def start_model() -> Path:
    """The warm start, made once."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
    from millrace.sft.supervised import sft

    place = kept_directory() / "delta-25m"
    if (place / "config.json").exists():
        return place
    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as base:
        make_character_tokenizer(base, "abcdefghijklmnopqrstuvwxyz>")
        tokenizer = load_tokenizer(base)
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **MODEL, **ids)).save_pretrained(base)
        draw = random.Random(0)
        words = [word(draw) for _ in range(5000)]
        pairs = [
            (tokenizer.encode(f"{w}>"), [*tokenizer.encode(w[::-1]), ids["eos_token_id"]]) for w in words
        ]
        steps = sft(
            base,
            pairs,
            out_dir=place,
            steps=WARM_STEPS,
            lr=WARM_LR,
            batch_tokens=WARM_TOKENS,
            optimizer="muon",
            on_step=lambda step: say(f"warm start, step {step.step}: loss {step.loss:.3f}"),
        )
    say(f"warm start: loss {steps[0].loss:.2f} to {steps[-1].loss:.2f}")
    return place


def word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS))


def sampled(model: Any, tokenizer: Any, version: int) -> tuple[Any, float]:
    """A batch of `version`, sampled with the published weights, and its mean reward."""
    import torch

    from millrace.core.completion.columns import TokenColumns, token_array
    from millrace.core.types import Batch, TrainGroup, TrainSequence

    draw, groups = random.Random(version), []
    words = [word(draw) for _ in range(PROMPTS)]
    prompts = torch.tensor([tokenizer.encode(f"{w}>") for w in words])
    tokens = prompts.repeat_interleave(GROUP_SIZE, 0)
    logprobs = []
    torch.manual_seed(version)
    with torch.no_grad():
        for _ in range(LETTERS):
            found = model(input_ids=tokens, use_cache=False).logits[:, -1].log_softmax(-1)
            drawn = found.exp().multinomial(1)
            logprobs.append(found.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], 1)
    chosen, rated = tokens[:, prompts.shape[1] :].tolist(), torch.cat(logprobs, 1).tolist()
    for group, text in enumerate(words):
        right = tokenizer.encode(text[::-1])
        sequences = [
            TrainSequence(
                i,
                TokenColumns.of(chosen[i], rated[i], version),
                sum(a == b for a, b in zip(chosen[i], right, strict=True)) / LETTERS,
                truncated=False,
            )
            for i in range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        ]
        groups.append(TrainGroup(group, token_array(prompts[group].tolist()), sequences))
    rewards = [sequence.reward for group in groups for sequence in group.sequences]
    return Batch(version, groups), sum(rewards) / len(rewards)


def trained(lr: float, steps: int, last: int) -> tuple[list[np.ndarray], list[np.ndarray], list[float]]:
    """(published versions: 0, 1 and the last ones; the last two in float32; rewards)."""
    import torch
    from transformers import AutoModelForCausalLM

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace.config.tables.training import Optimizer
    from millrace.conversations.tokenizer import load_tokenizer
    from millrace.trainer.batch.batch_step import StepSettings
    from millrace.trainer.model import load_model, named_weights
    from millrace.trainer.publish.publisher import PublishBuffers
    from millrace.trainer.trainer import PolicyTrainer

    start = start_model()
    tokenizer, sampler = load_tokenizer(start), AutoModelForCausalLM.from_pretrained(start)
    model = load_model(start, torch.device("cpu"))
    settings = StepSettings(Optimizer(lr=lr), 4096, LETTERS, 1.0, torch.float32, torch.bfloat16)
    trainer = PolicyTrainer(model, build(PolicyGradient()), settings)
    weights = named_weights(model)
    buffers = PublishBuffers(weights, torch.bfloat16)
    published, masters, rewards = [], [], []
    for version in range(steps + 1):
        blocks = buffers.fill()
        if version < 2 or version >= steps - last:
            published.append(np.concatenate([block.data for block in blocks]))
        if version >= steps - 1:
            masters.append(np.concatenate([w.detach().numpy().reshape(-1) for w in weights.values()]))
        if version < steps:
            with torch.no_grad():
                named = named_weights(sampler)
                for name, weight in weights.items():
                    named[name].copy_(weight.bfloat16())
            batch, reward = sampled(sampler, tokenizer, version)
            result = trainer.step(batch, rejected_dir=start)
            rewards.append(reward)
            if version % 10 == 0:
                norm = result.metrics["grad_norm"]
                say(f"lr {lr:g}, version {version}: reward {reward:.2f}, gradient norm {norm:.3f}")
    return published, masters, rewards


def compared(old: np.ndarray, new: np.ndarray, width: int, rounds: int) -> dict[str, Any]:
    before, after = old.view(np.uint8), new.view(np.uint8)
    cuts = [slice(at, at + CHUNK_BYTES) for at in range(0, len(after), CHUNK_BYTES)]
    into, encode_s, decode_s = np.zeros_like(after), [], []
    for _ in range(rounds):
        began = time.thread_time()
        deltas = [encode(after[cut], before[cut], width) for cut in cuts]
        encode_s.append(time.thread_time() - began)
        began = time.thread_time()
        for cut, delta in zip(cuts, deltas, strict=True):
            apply(delta, before[cut], into[cut])
        decode_s.append(time.thread_time() - began)
        assert np.array_equal(into, after), "a delta did not lead to its version"
        into[:] = 0
    gbit = after.nbytes * 8e-9
    kinds = Counter(kind_of(delta) for delta in deltas)
    unit = np.dtype(f"u{width}")
    return {
        "smaller": after.nbytes / sum(map(len, deltas)),
        "density": float((before.view(unit) != after.view(unit)).mean()),
        "encode": gbit / min(encode_s),
        "decode": gbit / min(decode_s),
        **{kind: kinds[kind] for kind in ("sparse", "xor", "raw")},
    }


def measure(lr: float, steps: int, last: int, rounds: int) -> dict[str, Any]:
    published, masters, rewards = trained(lr, steps, last)
    first = compared(*published[:2], 2, 1)
    newest = published[2:]
    pairs = [compared(old, new, 2, rounds) for old, new in itertools.pairwise(newest)]
    third = max(1, len(rewards) // 3)
    return {
        **medians(pairs),
        "first": first["smaller"],
        "first_density": first["density"],
        "float32": compared(*masters, 4, 1)["smaller"],
        "megabytes": published[0].nbytes / 1e6,
        "reward_from": sum(rewards[:third]) / third,
        "reward_to": sum(rewards[-third:]) / third,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=sized(60, 3))
    parser.add_argument(
        "--last", type=int, default=sized(10, 1), help="pairs of consecutive versions to compare"
    )
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    options = parser.parse_args()
    rows = {f"{lr:g}": measure(lr, options.steps, options.last, options.rounds) for lr in RATES}
    table(rows, first="lr")
    found: dict[str, Any] = {}
    for lr in RATES:
        row, name = rows[f"{lr:g}"], f"{lr:.0e}".replace("e-0", "e-")
        found |= {f"smaller_at_{name}": row["smaller"], f"density_at_{name}": row["density"]}
    found["encode_gbit_per_s"] = min(row["encode"] for row in rows.values())
    found["decode_gbit_per_s"] = min(row["decode"] for row in rows.values())
    report({**found, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
