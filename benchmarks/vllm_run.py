"""A real `millrace train` of a random model of 100 million parameters, with vLLM: what a step takes.

    python benchmarks/vllm_run.py [--python .venv-vllm/bin/python] [--dtype float32] [--steps 6] [--json]
    python benchmarks/vllm_run.py --family gemma3     # windows in five of six layers; no torch engine runs it

8 trajectories a step, at most 24 tokens each, one replica, schedule `millrace`. The reward is the part of a
completion's characters with an even code. It means nothing, but differs within a group: so weights change.

`load_ms`: median time for which vLLM stands still for a version, with the proof. `gap`: distance of the
trainer's log-probs from vLLM's, of tokens that were sampled with the version that is trained. `peak MB` is
the largest resident memory of a process, read every second, with what it shares with the others.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, NO_VLLM, VLLM_PYTHON, median, parser_of, report, require, sized, table

from millrace.core.events import Event
from millrace.observe.sinks.jsonl import read_events

VOCAB, WINDOW = 8192, 16
TIMEOUT_S = 3600.0
CONFIG = """
steps = {steps}
seed = 1
batch = {{ prompts = 2, group_size = 4 }}
sampling.max_tokens = 24
optimizer.lr = 1e-5
checkpoints.every = 1000
observe.tensorboard = false

[model]
path = "start"
dtype = "{dtype}"
device = "cpu"

[task]
kind = "gym"
name = "spell_backward"
template = "{{metadata[word]}}>"

[reward]
kind = "function"
path = "reward.py:reward"

[rollout]
engine = "vllm"
python = "{python}"
replicas = 1
slots = 8
max_sequence_tokens = 64

[supervision]
spawn_timeout_s = 600
heartbeat_timeout_s = 120
"""
REWARD = """
def reward(completion):
    return sum(ord(character) % 2 == 0 for character in completion) / max(len(completion), 1)
"""


def make_start(directory: Path, family: str, hidden: int, layers: int) -> int:
    """A random model with a tokenizer of characters; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen2Config
    from transformers.utils import logging

    from millrace.environments.tokenizer import load_tokenizer, make_character_tokenizer

    logging.disable_progress_bar()
    letters = [*map(chr, range(32, 127)), *map(chr, range(0x4E00, 0x4E00 + VOCAB))]
    make_character_tokenizer(directory, "".join(letters[: VOCAB - 5]))  # beside five special tokens
    tokenizer = load_tokenizer(directory)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 10 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 192,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    gemma = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW}
    config = Gemma3TextConfig(**shape, **gemma) if family == "gemma3" else Qwen2Config(**shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return int(model.num_parameters())


def train(directory: Path) -> tuple[list[Event], dict[int, float]]:
    """Events of the run, and the peak of each of its processes in MB, by pid."""
    words = ["-m", "millrace", "train", directory / "run.toml", "--run-dir", directory / "run"]
    peaks: dict[int, float] = {}
    with (directory / "log").open("w") as log:
        run = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=ENVIRONMENT)
        deadline_s = time.monotonic() + TIMEOUT_S
        while run.poll() is None:
            if time.monotonic() > deadline_s:
                run.kill()
            for pid in tree(run.pid):
                peaks[pid] = max(peaks.get(pid, 0.0), peak_MB(pid))
            time.sleep(1)
    if run.returncode != 0:
        raise SystemExit(f"{(directory / 'log').read_text()[-5000:]}\nthe run ended with {run.returncode}")
    events = list(read_events(directory / "run" / "events.jsonl"))
    return events, {**peaks, 0: peaks.get(run.pid, 0.0)}


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from tree(int(child))


def peak_MB(pid: int) -> float:
    """0.0 where it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


def figures(events: list[Event], peaks: dict[int, float]) -> dict[str, Any]:
    """Medians over steps and loads; times of steps without the first, which waits for the start."""
    of = {kind: [e for e in events if e.kind == kind] for kind in ("step", "pulled", "worker_started")}
    between = [b.time_s - a.time_s for a, b in zip(of["step"], of["step"][1:], strict=False)]
    gaps = [e.fields["logprob_gap"].get("0") for e in of["step"]]
    fresh = [gap for gap in gaps if gap is not None]
    tokens = sum(count for _, _, count in fresh)
    started = {"controller": 0} | {e.fields["name"]: e.fields["pid"] for e in of["worker_started"]}
    return {
        "steps": len(of["step"]),
        "loads": len(of["pulled"]),
        "step_s": median(between) if between else None,
        "training_s": median([e.fields["step_s"] for e in of["step"]]),
        "stage_ms": 1000 * median([e.fields["pull_s"] for e in of["pulled"]]),
        "load_ms": 1000 * median([e.fields["swap_s"] for e in of["pulled"]]),
        "gap_mean": sum(mean * count for mean, _, count in fresh) / tokens if tokens else None,
        "gap_max": max((most for _, most, _ in fresh), default=None),
        "peak MB": {name: round(peaks.get(pid, 0.0)) for name, pid in started.items()},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=VLLM_PYTHON, help="an interpreter with vLLM")
    parser.add_argument("--family", choices=("qwen2", "gemma3"), default="qwen2")
    parser.add_argument(
        "--model", default=sized("768x14", "192x2"), help="hidden size (of heads of 64) x layers"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=sized(6, 2))
    options = parser.parse_args()
    require(Path(options.python).exists(), NO_VLLM.format(options.python))
    hidden, layers = map(int, options.model.split("x"))
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        parameters = make_start(directory / "start", options.family, hidden, layers)
        (directory / "reward.py").write_text(REWARD)
        config = CONFIG.format(steps=options.steps, dtype=options.dtype, python=options.python)
        (directory / "run.toml").write_text(config)
        told = figures(*train(directory))
    table({name: {"peak MB": peak} for name, peak in told["peak MB"].items()})
    report({"parameters": parameters, **told}, as_json=options.json)


if __name__ == "__main__":
    main()
