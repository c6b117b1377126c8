"""`millrace quickstart`: the whole job on one small machine, from no model to a better one.

A small model with its own tokenizer learns a reasoning-gym task from demonstrations of which most are
wrong, so it samples a mixture of right and wrong behaviour. Asynchronous RL with two replicas then
finds the right one; half-way a replica is killed with SIGKILL. Nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from millrace.cli import run_directory
from millrace.cli.evaluation import Evaluation
from millrace.cli.interrupt import run_stoppable
from millrace.cli.run_directory import RunDirectory
from millrace.config.load import load
from millrace.config.schema import Config, GymTask
from millrace.core.errors import ConfigError
from millrace.core.events import Event
from millrace.core.types import Accounting
from millrace.observe.jsonl import read_events

NUM_DEMONSTRATIONS = 20_000
DEMONSTRATION_SEED = 7
RIGHT, COPIED = 0.3, 0.5  # shares of demonstrations; the rest has two letters swapped
WARM_START_STEPS = 250
EVALUATED_PROMPTS = 200
GAIN_MIN = 0.15
GAP_MAX = 1e-4

console = Console(highlight=False, soft_wrap=True)


def command(
    directory: Annotated[Path, typer.Option("--run-dir", help="Where everything is written.")] = Path(
        "runs/quickstart"
    ),
    overwrite: Annotated[bool, typer.Option(help="Remove an earlier quickstart there first.")] = True,
) -> None:
    """Make a small model, improve it by asynchronous RL, kill a replica on the way, and check it all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    config = _prepare(directory, overwrite)
    _say("1/4", "warm start: a small model learns from demonstrations, most of them wrong")
    _warm_start(config, directory)
    _say("2/4", "evaluate it on held-out prompts")
    before = _evaluate(config, Path(config.model.path))
    _say("3/4", f"train: {config.steps} steps, schedule `{config.schedule.kind}`; a replica will be killed")
    run = run_directory.create("run", directory / "run")
    saboteur = _Saboteur(at_version=config.steps // 2)
    _train(config, run, saboteur)
    _say("4/4", "evaluate what it learned")
    after = _evaluate(config, run.model)
    _report(before, after)
    passed = _verdict(_checks(before, after, run, saboteur))
    console.print(f"\n{time.monotonic() - started:.0f} s. Look around: millrace show {run.path}")
    raise typer.Exit(0 if passed else 1)


def _prepare(directory: Path, overwrite: bool) -> Config:
    if directory.exists():
        if not overwrite or not (directory / "quickstart.toml").exists():
            raise ConfigError(f"{directory} exists already: remove it, or name another --run-dir")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, mode=0o700)
    target = directory / "quickstart.toml"
    target.write_text(files("millrace.cli").joinpath("quickstart.toml").read_text())
    return load(target, ())


def _say(stage: str, text: str) -> None:
    console.print(f"\n[bold]{stage}[/bold] {text}")


# ---------------------------------------------------------------- warm start


def _warm_start(config: Config, directory: Path) -> None:
    from millrace.environments.tokenizer import load_tokenizer, make_character_tokenizer
    from millrace.trainer.sft import SFTStep, sft

    base = directory / "base"
    base.mkdir()
    make_character_tokenizer(base, string.ascii_letters + string.digits + " >-'.")
    tokenizer = load_tokenizer(base)
    num_parameters = _make_model(base, tokenizer)
    console.print(f"{num_parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens in the vocabulary")
    examples = [
        (tokenizer.encode(prompt), [*tokenizer.encode(completion), tokenizer.eos_token_id])
        for prompt, completion in _demonstrations(config)
    ]
    progress = iter(track(range(WARM_START_STEPS), "supervised steps", console=console))
    losses: list[float] = []

    def on_step(step: SFTStep) -> None:
        next(progress)
        losses.append(step.loss)

    sft(
        base,
        examples,
        out_dir=config.model.path,
        steps=WARM_START_STEPS,
        lr=4e-3,
        batch_tokens=1500,
        optimizer="muon",
        seed=config.seed,
        on_step=on_step,
    )
    next(progress, None)
    console.print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")


def _make_model(directory: Path, tokenizer: Any) -> int:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def _demonstrations(config: Config) -> list[tuple[str, str]]:
    """(prompt, completion) pairs: 30 % right, 50 % copy the word, 20 % swap two letters."""
    import reasoning_gym

    task = config.task
    assert isinstance(task, GymTask)
    rng = random.Random(DEMONSTRATION_SEED)
    rows = reasoning_gym.create_dataset(
        task.name, size=NUM_DEMONSTRATIONS, seed=DEMONSTRATION_SEED, **task.options
    )
    return [(task.template.format(**row), _demonstration(row, rng)) for row in rows]


def _demonstration(row: dict[str, Any], rng: random.Random) -> str:
    draw, answer = rng.random(), row["answer"]
    if draw < RIGHT:
        return str(answer)
    if draw < RIGHT + COPIED:
        return str(row["metadata"]["word"])
    at = rng.randrange(len(answer) - 1)
    return str(answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :])


# ---------------------------------------------------------------- train and evaluate


class _Saboteur:
    """A sink that kills a replica with SIGKILL: the first, from `at_version` on, that reports
    trajectories in the middle of their generation."""

    def __init__(self, at_version: int) -> None:
        self._at_version = at_version
        self._version = 0
        self._pids: dict[str, int] = {}
        self.victim: str | None = None
        self.killed_s = 0.0

    def __call__(self, event: Event) -> None:
        fields = event.fields
        if event.kind == "worker_started":
            self._pids[fields["name"]] = fields["pid"]
        elif event.kind == "step":
            self._version = fields["version"]
        elif event.kind == "report" and self._due() and fields["running"]:
            self.victim, self.killed_s = fields["replica"], event.time_s
            os.kill(self._pids[fields["replica"]], signal.SIGKILL)

    def _due(self) -> bool:
        return self.victim is None and self._version >= self._at_version


def _train(config: Config, run: RunDirectory, saboteur: _Saboteur) -> None:
    from millrace.cli import wire

    view = Console(highlight=False)

    def body(stop: asyncio.Event) -> Any:
        return wire.train(config, run, stop, saboteur, console=view)

    if not run_stoppable(body, view.print, at_once=view.show_cursor):
        console.print("Stopped. `millrace quickstart` begins anew.")
        raise typer.Exit(130)


def _evaluate(config: Config, model: Path) -> Evaluation:
    from millrace.cli.evaluate import HELD_OUT_SEED, evaluate, held_out_config

    held_out = held_out_config(config, model, seed=0, data_seed=HELD_OUT_SEED)
    result = evaluate(held_out, prompts=EVALUATED_PROMPTS, samples=4)
    console.print(f"greedy {result.greedy_accuracy:.3f}, sampled {result.sampled_accuracy:.3f}")
    return result


# ---------------------------------------------------------------- verdict


@dataclass(frozen=True)
class _Check:
    name: str
    passed: bool
    detail: str


def _checks(before: Evaluation, after: Evaluation, run: RunDirectory, saboteur: _Saboteur) -> list[_Check]:
    summary = json.loads(run.summary.read_text())
    events = list(read_events(run.events))
    return [
        _learned(before, after),
        _recovered(events, saboteur),
        _nothing_lost(run, summary),
        _digests_equal(events),
        _gap(summary),
    ]


def _learned(before: Evaluation, after: Evaluation) -> _Check:
    greedy = after.greedy_accuracy - before.greedy_accuracy
    sampled = after.sampled_accuracy - before.sampled_accuracy
    detail = f"greedy {greedy:+.3f}, sampled {sampled:+.3f}, at least {GAIN_MIN:+.2f} each"
    return _Check("learned", min(greedy, sampled) >= GAIN_MIN, detail)


def _recovered(events: list[Event], saboteur: _Saboteur) -> _Check:
    """The killed replica came back, and its trajectories went on from their partial tokens."""
    died = [e for e in events if e.kind == "worker_died" and e.fields["name"] == saboteur.victim]
    back = [e for e in events if e.kind == "worker_recovered" and e.fields["name"] == saboteur.victim]
    if not died or not back:
        return _Check(
            "recovered", False, f"{saboteur.victim}: died {len(died)} times, back {len(back)} times"
        )
    lost = _lost(events, saboteur)
    later = [e.fields for e in events if e.kind == "leased" and e.time_s > saboteur.killed_s]
    tokens = sum(f["resumed_tokens"] for f in later if not lost.isdisjoint(f["trajectory_ids"]))
    detail = (
        f"{saboteur.victim} killed, back after {back[0].fields['recovery_s']:.2f} s; "
        f"the {len(lost)} trajectories it worked on went on from {tokens} partial tokens"
    )
    return _Check("recovered", True, detail)


def _lost(events: list[Event], saboteur: _Saboteur) -> set[int]:
    """What the killed replica was working on."""
    lost: set[int] = set()
    for event in events:
        if event.time_s > saboteur.killed_s:
            break
        if event.kind == "leased" and event.fields["replica"] == saboteur.victim:
            lost.update(event.fields["trajectory_ids"])
        elif event.kind == "leased":
            lost.difference_update(event.fields["trajectory_ids"])
        elif event.kind == "finished":
            lost.discard(event.fields["trajectory_id"])
    return lost


def _nothing_lost(run: RunDirectory, summary: dict[str, Any]) -> _Check:
    """The ledger's accounts close, and every admitted trajectory ended, once."""
    from millrace.ledger.reader import LedgerReader

    accounting = Accounting(**summary["accounting"])
    with LedgerReader(run.ledger) as reader:
        trained = [i for step in reader.steps() for i in step.trajectory_ids]
    passed = accounting.balanced and len(trained) == len(set(trained)) == accounting.trained
    detail = f"{accounting.admitted} admitted = {accounting.trained} trained (each once)"
    for name in ("rejected", "stale", "abandoned", "failed", "in_flight"):
        detail += f" + {getattr(accounting, name)} {name.replace('_', ' ')}"
    return _Check("nothing lost", passed, detail)


def _digests_equal(events: list[Event]) -> _Check:
    """What every replica served is what the trainer published, version by version."""
    published = {e.fields["version"]: e.fields["digest"] for e in events if e.kind == "published"}
    served = [(e.fields["version"], e.fields["digest"]) for e in events if e.kind == "pulled"]
    equal = sum(published.get(version) == digest for version, digest in served)
    return _Check("digests equal", bool(served) and equal == len(served), f"{equal} of {len(served)} swaps")


def _gap(summary: dict[str, Any]) -> _Check:
    gap = summary["logprob_gap_staleness0"]
    passed = gap["max"] is not None and gap["max"] < GAP_MAX
    shown = (
        "no token at staleness 0" if gap["max"] is None else f"max {gap['max']:.1e}, mean {gap['mean']:.1e}"
    )
    return _Check("log-prob gap at staleness 0", passed, f"{shown}; limit {GAP_MAX:.0e}")


def _report(before: Evaluation, after: Evaluation) -> None:
    rows: list[tuple[str, Callable[[Evaluation], float]]] = [
        ("greedy accuracy", lambda e: e.greedy_accuracy),
        ("sampled accuracy", lambda e: e.sampled_accuracy),
        ("pass@4", lambda e: e.pass_at_k[4]),
    ]
    console.print()
    for name, value in rows:
        console.print(f"{name:18} {value(before):.3f} -> {value(after):.3f}")


def _verdict(checks: list[_Check]) -> bool:
    console.print()
    for check in checks:
        word = "[green]PASS[/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{word}  {check.name}: {check.detail}")
    return all(check.passed for check in checks)
