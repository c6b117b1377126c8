"""Asks an engine that serves its first weights, before it gets a trajectory."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from millrace.core import progress
from millrace.core.errors import DeadlineExceeded, SamplingError
from millrace.core.types import Progress, ReplicaLoad
from millrace.rollout.engine_kinds import ENGINES
from millrace.rollout.protocol import Engine, EngineOptions
from millrace.rollout.sampling_probe.bets import Draw
from millrace.rollout.sampling_probe.probe_questions import PROMPTS, Question, questions, works
from millrace.rollout.sampling_probe.verdict import TOLERANCE, faults

ANSWER_S = 300.0  # for all answers of an engine


class SamplingProbe:
    """The interview of a replica's engine, if `options.probe`."""

    def __init__(self, name: str, kind: str, engine: Engine, options: EngineOptions) -> None:
        self._name, self._kind, self._engine, self._options = name, kind, engine, options
        self._due, self._load = options.probe, ReplicaLoad(version=-1)

    def once(self) -> None:
        """Called when the engine serves a version: the first call asks. Raises: as `interview`."""
        if self._due:
            self._due = False
            interview(self._name, self._kind, self._engine, self._options)
            self._load = self._engine.load()

    def left_out_of(self, load: ReplicaLoad) -> ReplicaLoad:
        """The engine's `load`, without what the probe did."""
        steps = self._load.steps_since_swap if load.version == self._load.version else 0
        return msgspec.structs.replace(
            load,
            steps_since_swap=load.steps_since_swap - steps,
            generated_tokens=load.generated_tokens - self._load.generated_tokens,
            prefilled_tokens=load.prefilled_tokens - self._load.prefilled_tokens,
            drafted_tokens=load.drafted_tokens - self._load.drafted_tokens,
            accepted_tokens=load.accepted_tokens - self._load.accepted_tokens,
        )


def interview(name: str, engine_kind: str, engine: Engine, options: EngineOptions) -> None:
    """Nothing happens if the engine has work: its tokens are not the probe's.

    Raises: SamplingError, which names every fault. DeadlineExceeded: the engine does not answer.
    """
    vocabulary = _vocabulary(options.model_path)
    if vocabulary is None or engine.has_work or engine.has_finished:
        return
    cuts = "sampling.top_k" in ENGINES[engine_kind].can.settings and not options.server
    deadline_s, answers = time.monotonic() + ANSWER_S, dict[str, list[list[Draw]]]()
    asked = questions(seeded=options.seeded, cuts=cuts)
    for number in sorted({question.round for question in asked}):
        together = [question for question in asked if question.round == number]
        answers |= _answers(name, engine, together, vocabulary, deadline_s)
    tolerance = TOLERANCE[options.quantization or options.dtype]
    if found := faults(answers, vocabulary=vocabulary, tolerance=tolerance):
        raise SamplingError(
            f"{name} does not sample as it says (`rollout.engine` {engine_kind!r}, version {engine.version}; "
            f"{engine.computes}):\n  "
            + "\n  ".join(found)
            + "\n  Nothing was trained on it. Look for a known error of this release of the engine, and use "
            "another release. `rollout.probe = false` starts the run anyway"
        )


def _answers(
    name: str, engine: Engine, together: list[Question], vocabulary: int, deadline_s: float
) -> dict[str, list[list[Draw]]]:
    """Of each question of one round: by prompt, its draws."""
    asked = {question.name: list(works(question, vocabulary)) for question in together}
    ids = [work.trajectory_id for some in asked.values() for work in some]
    engine.submit(work for some in asked.values() for work in some)
    drawn = dict[int, Draw]()
    while len(drawn) < len(ids):
        if time.monotonic() > deadline_s or not (engine.has_work or engine.has_finished):
            engine.release(ids)
            raise DeadlineExceeded(
                f"{name}: a probe of its engine got {len(drawn)} of {len(ids)} tokens, "
                f"and waits {ANSWER_S:g} s at most"
            )
        engine.step()
        drawn |= dict(map(_draw, engine.take_progress()))
        progress.count()
    return {
        question: [
            [drawn[work.trajectory_id] for work in some if work.group_id == -1 - prompt]
            for prompt in range(PROMPTS)
        ]
        for question, some in asked.items()
    }


def _draw(part: Progress) -> tuple[int, Draw]:
    return part.trajectory_id, (part.columns.tokens[0], part.columns.logprobs[0])


class _Text(msgspec.Struct):
    vocab_size: int | None = None


class _Model(_Text):
    text_config: _Text | None = None


def _vocabulary(model_path: str) -> int | None:
    """The model's number of tokens. None: its configuration names none."""
    model = msgspec.json.decode((Path(model_path) / "config.json").read_bytes(), type=_Model)
    return model.vocab_size or (model.text_config.vocab_size if model.text_config else None)
