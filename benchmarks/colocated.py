"""One device in turns against the synchronous schedule: speed on the same cores, and memory of both roles.

    python benchmarks/colocated.py [--rounds 3] [--steps 6] [--json]

Both runs train the same prompts with the same seeds, with one replica, at staleness 0. In turns each side
computes on all cores while the other sleeps. `colocated_over_synchronous`: trained tokens/s from the first
lease to the last step, the median over rounds. `partial_over_synchronous`: the same with `areal` at staleness
1, which keeps unfinished trajectories over the turn of the trainer.

`peak_over_largest_role`: the most anonymous resident memory of trainer and replica together, over that of the
larger role alone, both of the run in turns. Left out are what the forkserver has, of which every worker is a
fork: the interpreter with its libraries. The relay is left out too: both runs have it.
`synchronous_peak_over_largest_role`: the same of the other run, where both roles are there at once.
"""

from __future__ import annotations

import os
import re
import string
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import medians, parser_of, report, say, sized, table

from millrace.chaos.child_run import ChildRun

HIDDEN, LAYERS = sized((512, 6), (64, 2))
MAX_TOKENS, GROUPS, GROUP = sized((192, 4, 4), (24, 2, 2))
LOOK_S = 0.01
RUN_S_MAX = 900.0
CONFIG = f"""
steps = {{steps}}
seed = {{seed}}
model = {{{{ path = "start", device = "cpu" }}}}
batch = {{{{ prompts = {GROUPS}, group_size = {GROUP} }}}}
sampling = {{{{ max_tokens = {MAX_TOKENS}, ignore_eos = true }}}}
optimizer.lr = 1e-5
checkpoints.every = 1000
reward = {{{{ kind = "gym" }}}}
observe.tensorboard = false

[task]
kind = "gym"
name = "spell_backward"
template = "{{{{metadata[word]}}}}>"

[rollout]
replicas = 1
slots = {GROUPS * GROUP}
max_sequence_tokens = {MAX_TOKENS + 64}
report_interval_s = 0.05
"""
RUNS = {
    "synchronous": ("schedule.kind=synchronous",),
    "colocated": ("schedule.kind=synchronous", "rollout.colocated=true"),
    "partial": ("schedule.kind=areal", "schedule.eta=1", "rollout.colocated=true"),
}


def make_start(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from millrace.environments.tokenizer import load_tokenizer, make_character_tokenizer

    logging.disable_progress_bar()
    make_character_tokenizer(directory, string.ascii_letters + string.digits + " >-'.")
    tokenizer = load_tokenizer(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HIDDEN // 8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


class RoleMemory:
    """The most anonymous resident bytes of each role so far, above those of the forkserver."""

    def __init__(self, run: ChildRun) -> None:
        self._run, self._base = run, 0
        self.together, self.alone = 0, defaultdict[str, int](int)

    def look(self) -> None:
        total = 0
        self._base = max([self._base, *map(anonymous_bytes, self._run.pids("forkserver").values())])
        for role in ("trainer", "replica"):
            grown = sum(map(self._grown, self._run.pids(role).values()))
            self.alone[role] = max(self.alone[role], grown)
            total += grown
        self.together = max(self.together, total)

    def _grown(self, pid: int) -> int:
        return max(0, anonymous_bytes(pid) - self._base)


def anonymous_bytes(pid: int) -> int:
    """Resident, of a process. 0: it is gone."""
    with suppress(OSError):
        match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
        return 0 if match is None else int(match[1]) * 1024
    return 0


def play(config: Path, directory: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """One run, to its end."""
    run = ChildRun(config, directory, overrides)
    memory, deadline_s = RoleMemory(run), time.monotonic() + RUN_S_MAX
    try:
        run.start()
        while run.exit_code is None and time.monotonic() < deadline_s:
            run.poll()
            memory.look()
            time.sleep(LOOK_S)
        run.poll()
        if run.exit_code != 0:
            raise SystemExit(f"{directory.name}: {run.last_words()}")
    finally:
        run.end()
    steps = [event for event in run.events if event.kind == "step"]
    began_s = next(event.time_s for event in run.events if event.kind == "leased")
    wall_s, turns = steps[-1].time_s - began_s, [e for e in run.events if e.kind in ("slept", "woke")]
    return {
        "tokens_per_s": sum(step.fields["trained_tokens"] for step in steps) / wall_s,
        "wall_s": wall_s,
        "hand_over_s": sum(event.fields["took_s"] for event in turns) / len(steps),
        "trainer_mb": memory.alone["trainer"] / 1e6,
        "replica_mb": memory.alone["replica"] / 1e6,
        "together_mb": memory.together / 1e6,
    }


def measure(rounds: int, steps: int) -> dict[str, Any]:
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as place:
        make_start(Path(place) / "start")
        for number in range(rounds):
            config = Path(place) / f"{number}.toml"
            config.write_text(CONFIG.format(steps=steps, seed=number))
            for name, overrides in RUNS.items():
                measured[name].append(play(config, Path(place) / f"{name}-{number}", overrides))
                say(f"{number + 1}/{rounds} {name}: {measured[name][-1]}")
    rows = {name: medians(each) for name, each in measured.items()}

    def over(name: str) -> float:
        pairs = zip(measured[name], measured["synchronous"], strict=True)
        return sorted(one["tokens_per_s"] / other["tokens_per_s"] for one, other in pairs)[rounds // 2]

    def peak(name: str) -> float:
        ratios = (one["together_mb"] / max(one["trainer_mb"], one["replica_mb"]) for one in measured[name])
        return max(ratios)

    return {
        "colocated_over_synchronous": over("colocated"),
        "partial_over_synchronous": over("partial"),
        "peak_over_largest_role": max(peak("colocated"), peak("partial")),
        "synchronous_peak_over_largest_role": peak("synchronous"),
        "rows": rows,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--steps", type=int, default=sized(6, 2))
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS",):  # the placement decides
        os.environ.pop(name, None)
    result = measure(options.rounds, options.steps)
    table(result["rows"])
    report(result, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
