"""A model that somebody else trained, against TRL's GRPOTrainer and AsyncGRPOTrainer: tokens/s and reward.

    python benchmarks/real_vs_trl.py --model DIRECTORY [--rounds 3] [--steps 8] [--only NAME ...] [--json]

`make real` makes such a DIRECTORY. The task is that of `examples/real/arithmetic.toml`: prompts in the same
order, batch, learning rate, temperature, length limit and staleness bound. For all, the last number of a
completion has to be the answer. Names with `_bf16` compute in bfloat16, the others in float32.

Rounds are interleaved. In the first one a peer runs with one thread a process and with as many as there are
cores. The better number counts, and stays. Ours chooses its threads. Rates count from the end of the first
step. The reward of a step is a mean over 32 completions, so the reward of many steps is compared.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from common import ROOT, medians, parser_of, report, require, say, table, train
from loop_vs_trl import Curve, Step, run_peer

from millrace.tasks.order import row_of

CONFIG = ROOT / "examples" / "real" / "arithmetic.toml"
TASKS = CONFIG.parent / "tasks.py"
KEYS = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
NUMBER = r"(\d+)"
CORES = len(os.sched_getaffinity(0))
PEERS = ("trl_grpo", "trl_async")
CONTESTANTS = ("millrace", "millrace_bf16", *PEERS)
OTHERS = tuple(f"{name}_bf16" for name in PEERS)

Row = dict[str, float]


class Contest:
    """Runs of `steps` steps from the chat model in `model`. Their files are in `directory`."""

    def __init__(self, model: Path, steps: int, directory: Path) -> None:
        self.model, self.steps, self.directory = model.resolve(), steps, directory
        self.threads: dict[str, int] = {}  # of each peer, once both numbers were tried

    def run(self, contestant: str, seed: int) -> Curve:
        name = contestant.removesuffix("_bf16")
        dtype = "float32" if name == contestant else "bfloat16"
        if name == "millrace":
            return self._ours(dtype, seed)
        tried = [self.threads[contestant]] if contestant in self.threads else sorted({1, CORES})
        curves = {threads: self._peer(name, dtype, seed, threads) for threads in tried}
        for threads, curve in curves.items():
            say(f"  {contestant}, {threads} threads: {figures(curve)}")
        self.threads[contestant] = max(tried, key=lambda threads: figures(curves[threads])["tokens_per_s"])
        return curves[self.threads[contestant]]

    def _ours(self, dtype: str, seed: int) -> Curve:
        values = {
            "steps": self.steps,
            "seed": seed,
            "model.path": self.model,
            "model.dtype": dtype,
            "task.path": f"{TASKS}:sums",
            "reward.kind": "exact",
            "reward.extract": NUMBER,
            "optimizer.betas": "[0.9,0.999]",
            "checkpoints.every": 1000,
            "evaluations": "[]",
        }
        sets = [f"{key}={value}" for key, value in values.items()]
        events = train(CONFIG.read_text(), self.directory / f"{dtype}-{seed}", threads=None, sets=sets)
        steps = [event for event in events if event["kind"] == "step"]
        return [Step(step["time_s"], step["trained_tokens"], step["reward_mean"]) for step in steps]

    def _peer(self, name: str, dtype: str, seed: int, threads: int) -> Curve:
        job = {
            "start": str(self.model),
            "prompts": str(self._rendered(seed)),
            "steps": self.steps,
            "seed": seed,
            "extract": NUMBER,
            "lr": KEYS["optimizer"]["lr"],
            "temperature": KEYS["sampling"]["temperature"],
            "max_tokens": KEYS["sampling"]["max_tokens"],
            "groups": KEYS["batch"]["prompts"],
            "group_size": KEYS["batch"]["group_size"],
            "staleness_max": KEYS["schedule"]["staleness_max"],
            "device": "cpu",
            "dtype": dtype,
        }
        return run_peer(name, job, self.directory / f"{name}-{dtype}-{seed}-{threads}", threads=threads)

    def _rendered(self, seed: int) -> Path:
        """The rows in the order of our shuffle, as the model's chat template renders them."""
        from transformers import AutoTokenizer

        path = self.directory / f"rows-{seed}.jsonl"
        if not path.exists():
            tokenizer = AutoTokenizer.from_pretrained(self.model)
            rows = runpy.run_path(str(TASKS))["sums"]()
            with path.open("w") as file:
                for row in (rows[row_of(i, len(rows), seed)] for i in range(len(rows))):
                    messages = [{"role": "user", "content": row["prompt"]}]
                    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                    file.write(json.dumps({"prompt": text, "answer": row["answer"]}) + "\n")
        return path


def figures(curve: Curve) -> Row:
    """From the end of the first step; `reward_last`: the mean of the second half of the steps."""
    seconds, last = curve[-1].t_s - curve[0].t_s, curve[len(curve) // 2 :]
    return {
        "tokens_per_s": sum(step.tokens for step in curve[1:]) / seconds,
        "s_per_step": seconds / (len(curve) - 1),
        "tokens_per_step": statistics.mean(step.tokens for step in curve),
        "reward_first": statistics.mean(step.reward for step in curve[: len(curve) // 2]),
        "reward_last": statistics.mean(step.reward for step in last),
    }


def show_rewards(found: dict[str, list[Curve]]) -> None:
    """By step, over all rounds."""
    print("\nreward by step")
    steps = range(len(next(iter(found.values()))[0]))
    table(
        {
            str(step + 1): {
                name: statistics.mean(curve[step].reward for curve in curves)
                for name, curves in found.items()
            }
            for step in steps
        },
        first="step",
    )


def ratios(rows: dict[str, Row]) -> Row:
    """Ours over each peer's, in the same number format; in bfloat16 also over float32, where both ran."""
    pairs = {f"over_{peer}_135m": ("millrace", peer) for peer in PEERS} | {
        f"bf16_over_{peer}_135m": ("millrace_bf16", peer) for peer in PEERS
    }
    pairs |= {f"bf16_over_{peer}_bf16_135m": ("millrace_bf16", f"{peer}_bf16") for peer in PEERS}
    return {
        name: rows[ours]["tokens_per_s"] / rows[peer]["tokens_per_s"]
        for name, (ours, peer) in pairs.items()
        if ours in rows and peer in rows
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="the directory of a chat model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next is one more")
    parser.add_argument("--only", nargs="+", default=CONTESTANTS, choices=CONTESTANTS + OTHERS)
    options = parser.parse_args()
    require(options.model, "--model DIRECTORY, the directory of a chat model")
    found: dict[str, list[Curve]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as directory:
        contest = Contest(options.model, options.steps, Path(directory))
        for number in range(options.rounds):
            for name, curves in found.items():
                curves.append(contest.run(name, options.seed + number))
                say(f"round {number + 1}, {name}: {figures(curves[-1])}")
    rows = {name: medians([figures(curve) for curve in curves]) for name, curves in found.items()}
    table(rows)
    show_rewards(found)
    threads: dict[str, Any] = {f"threads_{name}": count for name, count in contest.threads.items()}
    rewards = {name: [[step.reward for step in curve] for curve in curves] for name, curves in found.items()}
    report(threads | ratios(rows) | {"rows": rows, "rewards": rewards}, as_json=options.json)


if __name__ == "__main__":
    main()
