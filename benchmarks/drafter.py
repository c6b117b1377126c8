"""The trained drafter in Millrace's engine: the same tokens with and without it, and the time of both.

    python benchmarks/drafter.py [--task uneven] [--steps 48] [--json]

A head is trained on what the start model samples, as the trainer does it, one batch a step. The policy stays
as it is: its learning rate is next to 0. Then engines sample other batches in turns: without the head, with
it while that is measured to be faster, and with it in every step. Times are CPU seconds of the tails, while
at most `ROWS_MAX` trajectories run, behind a first epoch.

drafter_gain    CPU seconds of the tails without drafts over those with drafts while they are faster
forced_gain     the same with drafts in every step
right           share of draft tokens that were sampled; drafts of the engine that always drafts
steps_saved     share of decode steps that the engine that always drafts saves
update_s        CPU seconds of the head's updates for a batch; `step_s` of the policy's step
mismatches      tokens or log-probs that differ, bit for bit, with `rollout.exact`: has to be 0
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from common import kept_directory, parser_of, report, say, sized
from drafts_played import GROUP, PROMPTS, ROWS_MAX, Played, batches, play
from msgspec.structs import replace
from peers.start import TASKS, Task, make_start
from transformers import AutoTokenizer

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.types import Batch, TrainGroup, TrainSequence, Work
from millrace.engines.own.drafts.trained_drafter import TrainedDraftingEngine
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.torch_engine import TorchEngine
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.drafter_training import DraftingTrainer
from millrace.trainer.model import load_model

EPOCHS = 2  # the first of them is not timed
STEPS = sized(48, 2)


def open_engine(task: Task, start: Path, drafts: str | None, *, exact: bool) -> TorchEngine:
    shape = {"slots": PROMPTS * GROUP, "max_sequence_tokens": task.max_sequence_tokens}
    return load_engine(str(start), device="cpu", exact=exact, drafts=drafts, draft_rows_max=ROWS_MAX, **shape)


def with_head(engine: TorchEngine, head: dict[str, torch.Tensor], *, forced: bool) -> TorchEngine:
    """Give a served engine the tensors of a head. `forced`: it drafts in every step."""
    assert isinstance(engine, TrainedDraftingEngine)
    for name, tensor in head.items():
        engine._active.named[name].copy_(tensor)
    engine._drafter.swap()
    if forced:
        engine._worth.tries = lambda: True  # type: ignore[method-assign]
    return engine


def batch_of(works: Iterable[Work], sampled: Played, version: int) -> Batch:
    """What was sampled, with rewards that differ within each group."""
    groups: dict[int, TrainGroup] = {}
    for work in works:
        tokens, logprobs = sampled.columns[work.trajectory_id]
        columns = TokenColumns.of(tokens, logprobs, [0] * len(tokens))
        group = groups.setdefault(work.group_id, TrainGroup(work.group_id, work.prompt, []))
        reward = float(work.trajectory_id % 2)
        group.sequences.append(
            TrainSequence(work.trajectory_id, columns, reward, False, [True] * len(tokens))
        )
    return Batch(version, list(groups.values()))


def trained_head(task: Task, start: Path, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The head after `steps` batches, and CPU seconds of a step and of the updates beside it."""
    settings = StepSettings(
        optimizer=Optimizer(lr=1e-12),
        token_budget=4096,
        max_tokens=task.max_tokens,
        temperature=1.0,
        dtype=torch.float32,
        published=torch.float32,
    )
    model = load_model(str(start), torch.device("cpu"))
    trainer = DraftingTrainer(0, model, build(PolicyGradient()), settings)
    engine, tokenizer = open_engine(task, start, None, exact=False), AutoTokenizer.from_pretrained(start)
    step_s = update_s = 0.0
    with tempfile.TemporaryDirectory() as name:
        for version, (_, works) in zip(range(steps), endless(task, tokenizer), strict=False):
            sampled = Played()
            play(engine, works, sampled, timed=False)
            began_s = time.process_time()
            trainer.step(batch_of(works, sampled, version), rejected_dir=Path(name))
            stepped_s = time.process_time()
            trainer.drafter.finish()
            step_s, update_s = step_s + stepped_s - began_s, update_s + time.process_time() - stepped_s
    head = {name: tensor.detach().clone() for name, tensor in trainer.drafter.head.tensors.items()}
    return head, {"step_s": step_s / steps, "update_s": update_s / steps}


def endless(task: Task, tokenizer: Any) -> Iterator[tuple[int, list[Work]]]:
    """Batches of other rows than those that engines are compared on. No id comes twice."""
    for seed in count(100):
        for epoch, works in batches(task, tokenizer, seed=seed):
            apart = {"trajectory_id": seed << 20, "group_id": seed << 20}
            yield epoch, [replace(w, **{key: getattr(w, key) + x for key, x in apart.items()}) for w in works]


def compare(task: Task, start: Path, head: dict[str, torch.Tensor], *, exact: bool) -> dict[str, float]:
    """Engines without, with, and always with drafts, on the same batches in turns."""
    engines = {"without": open_engine(task, start, None, exact=exact)}
    for name in ("with", "forced"):
        engine = open_engine(task, start, "trained", exact=exact)
        engines[name] = with_head(engine, head, forced=name == "forced")
    played = {name: Played() for name in engines}
    for epoch, works in batches(task, AutoTokenizer.from_pretrained(start), seed=1):
        if epoch == EPOCHS:
            break
        for name, engine in engines.items():
            play(engine, works, played[name], timed=epoch > 0)
    without, load = played["without"], engines["forced"].load()
    steps = {name: engine.load().steps_since_swap for name, engine in engines.items()}
    return {
        "drafter_gain": without.tail_s / played["with"].tail_s,
        "forced_gain": without.tail_s / played["forced"].tail_s,
        "right": load.accepted_tokens / max(1, load.drafted_tokens),
        "drafted": load.drafted_tokens,
        "drafted_if_faster": engines["with"].load().drafted_tokens,
        "steps_saved": 1 - steps["forced"] / steps["without"],
        "other_tokens": sum(a[0] != played["forced"].columns[t][0] for t, a in without.columns.items()),
        "mismatches": sum(
            columns != other.columns[trajectory_id]
            for trajectory_id, columns in without.columns.items()
            for other in (played["with"], played["forced"])
        ),
    }


def measured(task: Task, *, steps: int) -> dict[str, float]:
    """The figures of the docstring. `steps`: batches that the head learns from."""
    start = make_start(task, kept_directory())
    head, seconds = trained_head(task, start, steps)
    say(f"trained: {seconds}")
    found = compare(task, start, head, exact=False)
    exact = compare(task, start, head, exact=True)
    say(f"not exact: {found}\nexact: {exact}")
    of_exact = {f"exact_{name}": exact[name] for name in ("drafter_gain", "forced_gain")}
    return found | of_exact | seconds | {"mismatches": exact["mismatches"]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=TASKS, default=sized("uneven", "short"))
    parser.add_argument("--steps", type=int, default=STEPS, help="batches that the head learns from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(measured(TASKS[options.task], steps=options.steps), as_json=options.json)


if __name__ == "__main__":
    main()
