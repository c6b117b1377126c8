"""Small runs of the real engine, trainer and sinks in one thread, each with one fault that can be planted.

In every step two groups are generated under one version and two across a swap, as an asynchronous run does.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.algorithms import build
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.completion.columns import TokenColumns
from millrace.core.events import Events
from millrace.core.types import (
    Accounting,
    Batch,
    Failed,
    Finish,
    Sampling,
    Score,
    Scored,
    TrainGroup,
    TrainSequence,
    Work,
)
from millrace.engines.own.load_engine import open_engine
from millrace.engines.own.torch_engine import TorchEngine
from millrace.observe.sinks.jsonl import EventLog
from millrace.rollout.protocol import EngineOptions
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.model import load_model, named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.trainer import PolicyTrainer

GROUP, TOKENS, HALF = 4, 12, 6
PROMPT = [10, 11, 12]


def make_model(directory: Path) -> Path:
    """Spread out enough that its choices depend on its weights."""
    make_character_tokenizer(directory, string.ascii_letters)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=57, num_attention_heads=2, num_key_value_heads=1, eos_token_id=0, **sizes)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6.0)
    model.save_pretrained(directory)
    return directory


def even_tokens(tokens: list[int]) -> Score:
    """A reward that any policy can raise a little at a time."""
    return Scored(sum(token % 2 == 0 for token in tokens) / len(tokens))


@dataclass
class World:
    """`pull` brings the trainer's weights into the engine; the other fields are what can go wrong."""

    model: Path
    lr: float = 1e-3
    grad_clip: float | None = 1.0
    steps: int = 8
    lag: int = 1
    engine_dtype: str = "float32"
    score: Callable[[list[int]], Score] = even_tokens
    frozen: str | None = None
    keeps_cache: bool = False

    def run(self, events: Events) -> None:
        """Tell `events` what a controller would."""
        self._events, self._ids, self._groups = events, 0, dict[int, tuple[int, list[int]]]()
        self._config = Config.model_validate(
            {
                "model": {"path": str(self.model)},
                "task": {"kind": "gym", "name": "chain_sum"},
                "reward": {"kind": "gym"},
                "optimizer": {"lr": self.lr, "grad_clip": self.grad_clip},
            }
        )
        self._trainer = self._make_trainer()
        options = EngineOptions(
            model_path=str(self.model),
            dtype=self.engine_dtype,
            device="cpu",
            slots=64,
            max_sequence_tokens=32,
            keep_kv=False,
            probe=False,
        )
        self._engine = open_engine(options)
        if self.keeps_cache:
            self._engine._cache.forget = lambda slot: None  # type: ignore[method-assign]
        events.emit("run_started", steps=self.steps)
        self._loop()
        events.emit("run_ended", ok=True, reason="done", took_s=1.0, accounting=asdict(Accounting()))

    def _make_trainer(self) -> PolicyTrainer:
        settings = StepSettings(self._config.optimizer, 4096, TOKENS, 1.0, torch.float32, torch.float32)
        device = torch.device("cpu")
        return PolicyTrainer(load_model(self.model, device), build(self._config.algorithm), settings)

    def _loop(self) -> None:
        self._pull()
        waiting: list[list[TrainGroup]] = []
        crossing = self._begin()
        while self._trainer.version < self.steps:
            waiting.append(self._finish([*crossing, *self._begin()]))
            crossing = self._begin()
            for _ in range(HALF):
                self._engine.step()
            if len(waiting) > self.lag - 1:
                self._step(waiting.pop(0))
            self._pull()

    def _pull(self) -> None:
        version, buffers = self._trainer.version, self._engine.standby_buffers()
        source = PublishBuffers(named_weights(self._trainer.model), getattr(torch, self.engine_dtype)).fill()
        for buffer, tensor in zip(buffers, source, strict=True):
            if buffer.name != self.frozen or version == 0:
                buffer.data[:] = tensor.data
        if self.frozen and version:
            active = {b.name: b.data for b in self._engine._active.buffers()}
            next(b for b in buffers if b.name == self.frozen).data[:] = active[self.frozen]
        self._engine.swap(version)

    def _begin(self) -> list[int]:
        """Two groups of work; their trajectory ids."""
        works = []
        for _ in range(2):
            for _ in range(GROUP):
                sampling = Sampling(max_tokens=TOKENS)
                works.append(Work(self._ids, self._ids // GROUP, 1, PROMPT, [], sampling, 7))
                self._ids += 1
        self._engine.submit(works)
        return [work.trajectory_id for work in works]

    def _finish(self, ids: list[int]) -> list[TrainGroup]:
        parts = _drain(self._engine, set(ids))
        groups: dict[int, list[TrainSequence]] = {}
        for trajectory_id in ids:
            columns = parts[trajectory_id]
            score = self.score(columns.tokens.tolist())
            self._tell_score(trajectory_id, score)
            if isinstance(score, Scored):
                sequence = TrainSequence(trajectory_id, columns, score.value, truncated=False)
                groups.setdefault(trajectory_id // GROUP, []).append(sequence)
        return [TrainGroup(i, PROMPT, members) for i, members in groups.items() if len(members) > 1]

    def _tell_score(self, trajectory_id: int, score: Score) -> None:
        value = score.value if isinstance(score, Scored) else None
        reason = score.reason if isinstance(score, Failed) else ""
        outcome = type(score).__name__.lower()
        self._events.emit("scored", trajectory_id=trajectory_id, value=value, outcome=outcome, reason=reason)

    def _step(self, groups: list[TrainGroup]) -> None:
        result = self._trainer.step(Batch(self._trainer.version, groups), rejected_dir=self.model.parent)
        rewards = [sequence.reward for group in groups for sequence in group.sequences]
        self._events.emit(
            "step",
            version=result.version,
            reward_mean=sum(rewards) / len(rewards),
            logprob_gap={s: list(gap) for s, gap in result.logprob_gap.items()},
            metrics=result.metrics,
        )


def _drain(engine: TorchEngine, wanted: set[int]) -> dict[int, TokenColumns]:
    """Step until all of `wanted` have finished."""
    parts: dict[int, TokenColumns] = {}
    open_ids = set(wanted)
    while open_ids:
        engine.step()
        for progress in engine.take_progress():
            parts.setdefault(progress.trajectory_id, TokenColumns()).extend(progress.columns)
            if progress.finish in (Finish.STOP, Finish.LENGTH):
                open_ids.discard(progress.trajectory_id)
    return parts


def recorded(world: World, path: Path) -> Any:
    """Run `world` into an events.jsonl, and read that as evidence."""
    from millrace.diagnose.evidence import Evidence
    from millrace.observe.sinks.jsonl import read_events

    times = iter(range(1_000_000))
    events = Events(lambda: float(next(times)), lambda: 0.0)
    log = EventLog(path)
    events.subscribe(log)
    world.run(events)
    log.close()
    evidence = Evidence()
    for event in read_events(path):
        evidence(event)
    return evidence
