"""The runs of the study of staleness: the quickstart's task, a start model of each size, summaries."""

from __future__ import annotations

import random
import shutil
import string
import tempfile
import time
from dataclasses import replace
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path
from typing import Any

import study
from staleness_design import CORRECTIONS, SIZES, Run, Size

from millrace.quickstart.start_model import COPIED, DEMONSTRATION_SEED, RIGHT, demonstration

WORDS = {"min_word_len": 3, "max_word_len": 8}
BATCH_TOKENS, ROW_TOKENS = 1500, 512

CONFIG = """
steps = {steps}
seed = {seed}
allow = ["uncorrected"]
algorithm = {algorithm}
model.path = "{start}"
batch = {{ prompts = 8, group_size = 8 }}
sampling.max_tokens = 12
optimizer = {{ lr = {rate}, warmup_steps = 5 }}

[task]
kind = "gym"
name = "spell_backward"
options = {{ min_word_len = 3, max_word_len = 8 }}
template = "{{metadata[word]}}>"

[reward]
kind = "gym"

[rollout]
replicas = 1
slots = 64
max_sequence_tokens = 32
"""


EXAMPLE = study.ROOT / "examples" / "real" / "arithmetic.toml"


def _real_config(model: Path, *, algorithm: str, rate: float, steps: int, seed: int) -> Any:
    from millrace.config.load import load

    named = {"steps": steps, "seed": seed, "algorithm": algorithm, "optimizer.lr": rate}
    sets = [f"model.path={model.resolve()}", 'allow=["uncorrected"]', "rollout.max_sequence_tokens=128"]
    return load(EXAMPLE, [*sets, *(f"{name}={value}" for name, value in named.items())])


def _config(start: Path, *, algorithm: str, rate: float, steps: int = 1, seed: int = 0) -> Any:
    from millrace.config.load import load

    text = CONFIG.format(start=start, algorithm=algorithm, rate=rate, steps=steps, seed=seed)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "run.toml").write_text(text)
        return load(Path(directory) / "run.toml")


def make_start(name: str, directory: Path) -> Path:
    """The start model of a size, made once. Most of its demonstrations are wrong (`_demonstration`)."""
    own = directory / f"start-{name}-{DESIGN}"
    with (directory / "lock").open("w") as lock:
        flock(lock, LOCK_EX)  # another worker may be making it
        if not (own / "start" / "model.safetensors").exists():
            shutil.rmtree(own, ignore_errors=True)
            _learn(SIZES[name], own / "base", own / "start")
    return own / "start"


def _learn(size: Size, base: Path, out: Path) -> None:
    from peers.start import untrained

    from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
    from millrace.sft.supervised import sft

    base.mkdir(parents=True)
    make_character_tokenizer(base, string.ascii_letters + string.digits + " >-'.")
    tokenizer = load_tokenizer(base)
    untrained(tokenizer, hidden=size.hidden, layers=size.layers).save_pretrained(base)
    examples = [
        (tokenizer.encode(f"{word}>"), [*tokenizer.encode(shown), tokenizer.eos_token_id])
        for word, shown in _demonstrations(size.demonstrations * BATCH_TOKENS // 10)
    ]
    steps, lr = size.demonstrations, size.demonstration_rate
    sizes = {"batch_tokens": BATCH_TOKENS, "row_tokens": ROW_TOKENS}
    sft(base, examples, out_dir=out, steps=steps, lr=lr, device="cpu", **sizes)


def _demonstrations(count: int) -> list[tuple[str, str]]:
    """Words, and their letters backwards: 30 % right, 50 % not turned, 20 % with two letters swapped."""
    import reasoning_gym

    rng = random.Random(DEMONSTRATION_SEED)
    rows = reasoning_gym.create_dataset("spell_backward", size=count, seed=DEMONSTRATION_SEED, **WORDS)
    return [(row["metadata"]["word"], demonstration(row, rng)) for row in rows]


def make(run: Run, starts: Path, model: Path | None) -> dict[str, Any]:
    """A summary: held-out rewards in thousandths, greedy accuracy, CPU seconds, and the effective sample size
    of the later half, as a share of the tokens. `starts`: where start models are. `model`: SmolLM2's."""
    import torch
    from one_process import Evaluations, OneProcess

    torch.set_num_threads(1)
    size = SIZES[run.size]
    algorithm = CORRECTIONS[run.correction]
    configured = _real_config if size.real else _config
    start = model if size.real else make_start(run.size, starts)
    assert start is not None
    config = configured(start, algorithm=algorithm, rate=run.rate, steps=size.steps, seed=run.seed)
    began_s = time.process_time()
    record = OneProcess(config, run.staleness).run(Evaluations(size.every, size.held_out, size.greedy))
    later = [step.metrics for step in record.steps[len(record.steps) // 2 :]]
    return {
        "rewards": [round(1000 * reward) for reward in record.rewards],
        "greedy": round(record.greedy, 4),
        "ess": round(sum(step["ess"] for step in later) / len(later), 3),
        "cpu_s": round(time.process_time() - began_s),
    }


_SIZES = {name: replace(size, rates=()) for name, size in SIZES.items()}  # the rate is a part of each run
DESIGN = sha256(repr((CONFIG, CORRECTIONS, _SIZES, WORDS, RIGHT, COPIED)).encode()).hexdigest()[:16]
"""Changes with what all runs have in common, so that results of other runs are not taken for these."""
