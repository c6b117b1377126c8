"""The whole loop at sizes at which products of matrices are most of the work, on a CPU: against what the
products alone would allow, and at 30 M parameters against both trainers of TRL.

    python benchmarks/large.py [--parts limit peers 0_5b] [--sizes 0_8m 30m 125m] [--rounds 1] [--json]

Models have the shape of Qwen3 and random weights, so nearly every completion has all of its 96 tokens.
float32. Ours chooses its threads. A peer runs with one thread a process and with as many as there are cores,
and its better rate counts. Rates count from the end of the first fifth of the steps.

limit   `loop_over_limit_SIZE`: trained tokens/s, over the arithmetic rate of all cores by 8 operations for
        each parameter and token: 2 to sample a token, 6 to train on it. Prompts, attention, the optimizer
        and the second logits of the backward pass are not in the limit. The rate is that of a product of
        1024 x 1024 matrices on every core at once, measured before and after the run.
peers   `over_trl_grpo_30m` and `over_trl_async_30m`: trained tokens/s over those of GRPOTrainer and of
        AsyncGRPOTrainer, with the same start, prompts, batch, length limit and staleness bound.
0_5b    `step_0_5b_s`: seconds from step to step with the shape of Qwen2.5 0.5B, beside
        `step_0_5b_limit_s`, which is the limit above. `memory_0_5b_gb`: how far the host's free memory
        falls. `logprob_gap_0_5b`: mean |trainer - engine| over a step's tokens, nats; the largest step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import QUICK, cache_directory, medians, parser_of, report, require, say, sized, table
from loop_vs_trl import SCRIPTS, Bench, Curve, Step, tokens_per_s
from peers.start import TASKS, make_untrained
from peers.trl.venv import present

from millrace.devices.inventory import read_memory

TASK = TASKS["short"]
CORES = len(os.sched_getaffinity(0))
OPERATIONS = 8
PRODUCT, RATE_S = sized(1024, 256), sized(3.0, 0.2)
SAMPLE_S = 0.1

Figures = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A model's shape, and a run of it. `batch`: other keys of the run's configuration."""

    shape: dict[str, int]
    steps: int
    batch: dict[str, int]

    @property
    def parameters(self) -> int:
        """Those that multiply: all matrices, the tied embedding once, as the output projection."""
        shape = self.shape
        wide, head = shape["hidden"], shape["head_dim"]
        heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
        attention = 2 * wide * head * (heads + kv_heads)
        layer = attention + 3 * wide * shape["intermediate_size"]
        return shape["layers"] * layer + wide * shape["vocab_size"]


def size(hidden: int, layers: int, *, heads: int, kv: int, wide: int, vocab: int, **run: int) -> Size:
    """`wide`: between the matrices of an MLP. With --quick: tiny, whatever is asked."""
    steps, batch = sized(run.pop("steps"), 3), sized(run, {})
    if QUICK:
        hidden, layers, heads, kv, wide, vocab = 32, 2, 4, 2, 96, 384
    shape = {"hidden": hidden, "layers": layers, "intermediate_size": wide, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": hidden // heads}
    return Size(shape | heads_of, steps, batch)


SIZES = {
    "0_8m": size(128, 4, heads=4, kv=2, wide=384, vocab=384, steps=60),
    "30m": size(512, 8, heads=4, kv=2, wide=1536, vocab=8192, steps=8),
    "125m": size(768, 12, heads=6, kv=2, wide=3072, vocab=24_576, steps=5, groups=4),
    "0_5b": size(896, 24, heads=14, kv=2, wide=4864, vocab=151_936, steps=4, groups=2, group_size=4),
}
LIMITED = ("0_8m", "30m", "125m")


# ---------------------------------------------------------------- what the machine can do


def product_rate(begin_s: float) -> float:
    """FLOP/s of this process's products, in the `RATE_S` seconds from `begin_s` (of the wall clock) on."""
    import torch

    from millrace.devices.matmul import matmul

    a, b = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    matmul(a, b)
    time.sleep(max(0.0, begin_s - time.time()))
    count, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < RATE_S:
        matmul(a, b)
        count += 1
    return 2 * PRODUCT**3 * count / taken


def peak_rate() -> float:
    """FLOP/s of all cores at once."""
    with ProcessPoolExecutor(CORES, mp_context=get_context("spawn")) as pool:
        list(pool.map(abs, range(CORES)))  # the processes are there
        begin_s = time.time() + sized(8.0, 4.0)  # and have imported torch by then
        return sum(pool.map(product_rate, [begin_s] * CORES))


class LowestFree:
    """The least memory that was free meanwhile, in bytes."""

    def __enter__(self) -> Self:
        self.before = self.lowest = read_memory()[1]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self.lowest = min(self.lowest, read_memory()[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()


# ---------------------------------------------------------------- runs


class Loops:
    """Runs of ours and of the peers, with untrained models in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._benches: dict[str, Bench] = {}

    def bench(self, name: str) -> Bench:
        if name not in self._benches:
            directory = self.directory / name
            directory.mkdir()
            start = make_untrained(TASK, directory / "start", **SIZES[name].shape)
            self._benches[name] = Bench(TASK, SIZES[name].steps, directory, start=start)
        return self._benches[name]

    def ours(self, name: str, seed: int) -> list[dict[str, Any]]:
        """The `step` events of a run."""
        return self.bench(name).train("millrace", seed, threads=None, **SIZES[name].batch)

    def limited(self, name: str, seed: int) -> Figures:
        """Trained tokens/s, beside what the products allow."""
        before = peak_rate()
        rate = tokens_per_s(curve_of(self.ours(name, seed)))
        peak = statistics.mean([before, peak_rate()])
        limit = peak / (OPERATIONS * SIZES[name].parameters)
        row = {"tokens_per_s": rate, "limit": limit, "over_limit": rate / limit, "peak_gflops": peak / 1e9}
        say(f"{name} seed {seed}: {row}")
        return row

    def peer(self, name: str, seed: int) -> float:
        """Trained tokens/s at 30 M, with the threads that serve it best."""
        rates = {}
        for threads in sized(sorted({1, CORES}), [1]):
            rates[threads] = tokens_per_s(self.bench("30m").run(name, seed, threads=threads))
            say(f"{name} seed {seed}, {threads} threads: {rates[threads]:.0f} tokens/s")
        return max(rates.values())

    def large_step(self, seed: int) -> Figures:
        before = peak_rate()
        with LowestFree() as memory:
            events = self.ours("0_5b", seed)
        peak = statistics.mean([before, peak_rate()])
        curve = curve_of(events)
        seconds = [later.t_s - earlier.t_s for earlier, later in pairwise(curve)]
        operations = OPERATIONS * SIZES["0_5b"].parameters * statistics.mean(step.tokens for step in curve)
        return {
            "step_0_5b_s": statistics.median(seconds),
            "step_0_5b_limit_s": operations / peak,
            "memory_0_5b_gb": (memory.before - memory.lowest) / 1e9,
            "logprob_gap_0_5b": max(logprob_gap(event) for event in events),
        }


def curve_of(events: list[dict[str, Any]]) -> Curve:
    return [Step(event["time_s"], event["trained_tokens"], event["reward_mean"]) for event in events]


def logprob_gap(event: dict[str, Any]) -> float:
    """The mean over the tokens of a step, of the means by staleness."""
    gaps = event["logprob_gap"].values()
    return sum(mean * count for mean, _, count in gaps) / sum(count for *_, count in gaps)


# ---------------------------------------------------------------- parts


def limit_part(loops: Loops, names: list[str], seeds: range) -> Figures:
    rows = {name: medians([loops.limited(name, seed) for seed in seeds]) for name in names}
    table({f"{name} ({SIZES[name].parameters / 1e6:.1f} M)": row for name, row in rows.items()})
    over = {f"loop_over_limit_{name}": row["over_limit"] for name, row in rows.items()}
    rates = {f"tokens_per_s_{name}": row["tokens_per_s"] for name, row in rows.items()}
    peaks = {f"peak_gflops_{name}": row["peak_gflops"] for name, row in rows.items()}
    return over | rates | peaks


def peers_part(loops: Loops, seeds: range, ours: float | None) -> Figures:
    """`ours`: the rate at 30 M, where it was measured already."""
    if ours is None:
        ours = statistics.median(tokens_per_s(curve_of(loops.ours("30m", seed))) for seed in seeds)
    rates = {name: statistics.median(loops.peer(name, seed) for seed in seeds) for name in SCRIPTS}
    over = {f"over_{name}_30m": ours / rate for name, rate in rates.items()}
    return over | {f"{name}_tokens_per_s_30m": rate for name, rate in rates.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", default=["limit", "peers", "0_5b"])
    parser.add_argument("--sizes", nargs="+", default=list(LIMITED), choices=LIMITED)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=5207, help="of the first round; the next is one more")
    options = parser.parse_args()
    seeds, figures = range(options.seed, options.seed + options.rounds), {}
    require("peers" not in options.parts or not QUICK or present(cache_directory()), "TRL is not installed")
    with tempfile.TemporaryDirectory() as directory:
        loops = Loops(Path(directory))
        if "limit" in options.parts:
            figures |= limit_part(loops, options.sizes, seeds)
        if "peers" in options.parts:
            figures |= peers_part(loops, seeds, figures.get("tokens_per_s_30m"))
        if "0_5b" in options.parts:
            figures |= loops.large_step(options.seed)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
