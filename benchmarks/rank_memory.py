"""Peak memory of each rank of the trainer, against what `millrace train --dry-run` says.

    python benchmarks/rank_memory.py [--ranks 1 2] [--cases plain recompute] [--json]

Each rank is a process with the trainer's role: it loads a Qwen3 of 108 M parameters, makes two steps of full
micro-batches, a checkpoint and an export. Its peak is the growth of its resident memory beyond what it had
after its imports. `dry_run_error` is the largest |said - measured| / measured. `rank_peak_over_share` is the
peak of a rank of the most ranks, over its share of the states (16 bytes a parameter) and what one process,
for which nothing is divided, holds beside its states in the same micro-batch.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, parser_of, report, say, sized, table
from memory import imports, resident

from millrace.runtime.local.launcher import DEFAULTS

SIZE = {
    "vocab_size": sized(32768, 512),
    "hidden_size": sized(768, 96),
    "intermediate_size": sized(2304, 288),
    "num_hidden_layers": sized(12, 2),
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT, SEQUENCE, GROUP = 32, 256, 2
ROW = PROMPT + GROUP * (SEQUENCE - PROMPT - 1)  # tokens of a group: what follows the last is not forwarded
STATE_BYTES = 16
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "recompute": {"model": {"recompute": True}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "reference": {"algorithm": {"kind": "grpo", "kl": 0.1}},
    "offload": {"trainer": {"offload": True}},
    "8bit": {"optimizer": {"states": "8bit"}},
}
TIMEOUT_S = 3000.0


def make_model(directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZE)).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")


def configuration(model: Path, case: str, ranks: int) -> dict[str, Any]:
    """Every rank has one row of two sequences with each step."""
    whole: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "device": "cpu"},
        "task": {"kind": "gym", "name": "chain_sum"},
        "reward": {"kind": "gym"},
        "optimizer": {"lr": 1e-4},
        "trainer": {"shard": ranks},
        "batch": {"prompts": 2, "group_size": GROUP, "token_budget": ROW},
        "rollout": {"max_sequence_tokens": SEQUENCE, "replicas": 1, "slots": 1},
        "sampling": {"max_tokens": SEQUENCE - PROMPT},
    }
    for section, keys in CASES[case].items():
        whole[section] = whole.get(section, {}) | keys
    return whole


def make_batch(version: int) -> Any:
    from millrace.core.completion.columns import TokenColumns
    from millrace.core.types import Batch, TrainGroup, TrainSequence

    def sequence(index: int) -> TrainSequence:
        tokens = [(7 * index + 3 * i) % SIZE["vocab_size"] for i in range(SEQUENCE - PROMPT)]
        columns = TokenColumns.of(tokens, [-1.0] * len(tokens), version)
        return TrainSequence(index, columns, index % 2, truncated=False)

    groups = [TrainGroup(g, [1] * PROMPT, [sequence(g * GROUP + i) for i in range(GROUP)]) for g in range(2)]
    return Batch(version, groups)


async def work(config: dict[str, Any], directory: Path) -> None:
    from millrace.trainer.role import TorchTrainer

    role = TorchTrainer(config, str(directory / "run"), "millrace.weights.ring:open_writer", "cpu")
    await role.load(None)
    for version in range(2):
        await role.step(make_batch(version))
    await role.checkpoint(str(directory / "checkpoints"))
    await role.await_saved()
    await role.export(str(directory / "exported"))


def one_rank(config: dict[str, Any], directory: Path) -> None:
    """In a process of its own: prints its peak."""
    imports()
    importlib.import_module("millrace.trainer.ranks.divided")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    asyncio.run(work(config, directory))
    print(resident("VmHWM") - before, flush=True)
    os._exit(0)  # gloo's threads outlive what they talk about


def peaks(config: dict[str, Any], ranks: int) -> list[int]:
    """Bytes, of each rank."""
    return [int(line) for line in run_ranks(__file__, config, ranks)]


def run_ranks(script: str, config: dict[str, Any], ranks: int, *more: str) -> list[str]:
    """The last line of each of the processes `script --rank CONFIG DIRECTORY MORE`, which are one trainer."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, script, "--rank", json.dumps(config), place, *more]
        shared = {"WORLD_SIZE": str(ranks), "MILLRACE_RENDEZVOUS": f"file://{place}/rendezvous"}
        started = [
            subprocess.Popen(
                command,
                env=ENVIRONMENT
                | DEFAULTS
                | ({} if ranks == 1 else shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
                | {"GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"a rank of {ranks} failed")
    return [output.splitlines()[-1] for output in outputs]


def said(config: dict[str, Any]) -> tuple[int, int]:
    """What `--dry-run` says of a rank, and the parameters of the model."""
    from millrace.config.schema import Config
    from millrace.run.compose import place

    placed = place(Config.model_validate(config)).main
    return placed.rank_peak_bytes, placed.needs.num_parameters


def measure(cases: list[str], ranks: list[int]) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    beside: dict[str, float] = {}
    over_share = []
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place))
        for case in cases:
            for count in sorted(ranks):
                say(f"{case} on {count}")
                config = configuration(Path(place), case, count)
                due, parameters = said(config)
                found = max(peaks(config, count))
                beside.setdefault(case, found - parameters * STATE_BYTES / count)
                share = parameters * STATE_BYTES / count + beside[case]
                if case == "plain" and count == max(ranks):
                    over_share.append(found / share)
                rows[f"{case} {count}"] = {
                    "said_mb": due / 1e6,
                    "peak_mb": found / 1e6,
                    "error": (due - found) / found,
                    "over_share": found / share,
                }
    return {
        "rank_peak_over_share": max(over_share, default=None),
        "dry_run_error": max(abs(row["error"]) for row in rows.values()),
        "rows": rows,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", choices=CASES, nargs="+", default=sized(["plain", "recompute"], ["plain"]))
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        one_rank(json.loads(options.rank[0]), Path(options.rank[1]))
        return
    result = measure(options.cases, options.ranks)
    table(result["rows"])
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
