"""Tokens per second of the torch engine against transformers' `generate` and continuous batching.

    python benchmarks/engine.py [--models 128x4 224x6] [--requests 32 128] [--rounds 3] [--json]

Each request has its own budget of new tokens: log-normal with a median of 96 and a 99th percentile ten
times that, cut to [16, 1024]. All three produce exactly the budgeted tokens (stop tokens are off), sampled
at temperature 1; ours and `generate` give log-probs or logits besides. `generate` runs the requests as one
padded batch, as long as the longest; only budgeted tokens count. Rounds are interleaved, so that noise on the
machine hits all alike; `ratio_vs_generate` is that of the first model and the first number of requests.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, whose threads spin at barriers

import torch
from common import median, parser_of, report, say, sized, table
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.torch_engine import TorchEngine

PROMPT_TOKENS = 24
MEDIAN_TOKENS, LONGEST = sized((96, 1024), (16, 32))
SIGMA = 0.99  # exp(2.326 sigma) = 10: the 99th percentile over the median


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    new_tokens: int


def make_model(directory: str, hidden: int, layers: int) -> int:
    """A random Qwen3 without a stop token; returns its number of parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return model.num_parameters()


def make_requests(
    count: int, *, prompt: int = PROMPT_TOKENS, middle: int = MEDIAN_TOKENS, longest: int = LONGEST
) -> list[Request]:
    """Budgets at the quantiles of the distribution, in random order: the same shape for any count."""
    generator = torch.Generator().manual_seed(1)
    quantiles = (torch.randperm(count, generator=generator) + 0.5) / count
    lengths = (middle * (SIGMA * torch.special.ndtri(quantiles)).exp()).clamp(16, longest)
    prompts = torch.randint(512, (count, prompt), generator=generator)
    return [Request(p, n) for p, n in zip(prompts.tolist(), lengths.int().tolist(), strict=True)]


def ours(engine: TorchEngine, requests: list[Request], round_index: int) -> int:
    engine.submit(
        Work(i, i, round_index, r.prompt, token_array(), Sampling(max_tokens=r.new_tokens), seed=round_index)
        for i, r in enumerate(requests)
    )
    tokens = 0
    while engine.has_work or engine.has_finished:
        engine.step()
        tokens += sum(len(progress.columns) for progress in engine.take_progress())
    return tokens


def padded_generate(model: Any, requests: list[Request]) -> int:
    prompts = torch.tensor([request.prompt for request in requests])
    longest = max(request.new_tokens for request in requests)
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=longest,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape[1] == PROMPT_TOKENS + longest
    return sum(request.new_tokens for request in requests)


def continuous_batching(manager: Any, requests: list[Request]) -> int:
    for request in requests:
        manager.add_request(request.prompt, max_new_tokens=request.new_tokens)
    tokens, left = 0, len(requests)
    while left:
        result = manager.get_result(timeout=60)
        assert result is not None, "continuous batching gave nothing for 60 s"
        if result.is_finished():
            tokens, left = tokens + len(result.generated_tokens), left - 1
    return tokens


@contextmanager
def continuous_batching_manager(model: Any, longest: int) -> Iterator[Any]:
    """One manager for all rounds: starting it is not part of the measurement."""
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=longest, pad_token_id=0, eos_token_id=-1
    )
    memory = ContinuousBatchingConfig(max_memory_percent=sized(0.3, 0.05))  # a second one needs some too
    with model.continuous_batching_context_manager(config, continuous_batching_config=memory) as manager:
        yield manager


def measure(hidden: int, layers: int, count: int, rounds: int) -> dict[str, float]:
    """Median tokens per second of each, rounds interleaved, after one round of warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        parameters = make_model(directory, hidden, layers)
        engine = load_engine(directory, device="cpu", slots=count, max_sequence_tokens=1088)
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
    requests = make_requests(count)
    rates: dict[str, list[float]] = {"millrace": [], "generate": [], "continuous": []}
    with continuous_batching_manager(model, LONGEST) as manager:
        contestants: dict[str, Callable[[int], int]] = {
            "millrace": lambda index: ours(engine, requests, index),
            "generate": lambda _: padded_generate(model, requests),
            "continuous": lambda _: continuous_batching(manager, requests),
        }
        for index in range(rounds + 1):
            for name, run in contestants.items():
                started = time.perf_counter()
                tokens = run(index)
                if index:
                    rates[name].append(tokens / (time.perf_counter() - started))
            say(f"{hidden}x{layers}, {count} requests: round {index} of {rounds}")
    row = {name: median(values) for name, values in rates.items()}
    return {
        "parameters": parameters,
        "tokens": sum(request.new_tokens for request in requests),
        **{f"{name}_tok_s": rate for name, rate in row.items()},
        "vs_generate": row["millrace"] / row["generate"],
        "vs_continuous": row["millrace"] / row["continuous"],
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--models", nargs="+", default=sized(["128x4", "224x6"], ["64x2"]), help="hidden size x layers"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=sized([32, 128], [4]))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rows = {}
    for model in options.models:
        hidden, layers = map(int, model.split("x"))
        for count in options.requests:
            rows[f"{model}, {count} requests"] = measure(hidden, layers, count, options.rounds)
    table(rows)
    first = next(iter(rows.values()))
    result = {"ratio_vs_generate": first["vs_generate"], "ratio_vs_continuous": first["vs_continuous"]}
    report({**result, "tokens_per_s": first["millrace_tok_s"], "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
