"""What was paid for, as text: samples of a run's ledger for the doctor, and the first canary that earns."""

from __future__ import annotations

from pathlib import Path

from millrace.config.tables.evaluations import EvaluationSection
from millrace.conversations.tokenizer import Decode
from millrace.core.completion.marked import unmarked
from millrace.core.events import Event, Events
from millrace.core.rounding import ABSOLUTE, reaches
from millrace.core.types import EvaluationAttempt
from millrace.diagnose.evidence import Evidence, ScoredText
from millrace.ledger.reading.reader import LedgerReader
from millrace.ledger.reading.samples import Sample
from millrace.observe.conversation_times import sampled_tokens
from millrace.observe.shown_samples import clipped

EARLY, LATE = (0.0, 0.2), (0.8, 1.0)  # parts of the run
NUM = 128
SHOWN_CHARACTERS = 300


def read_texts(evidence: Evidence, reader: LedgerReader, decode: Decode) -> None:
    """At most `NUM` completions of each sort, each of another row. Raises: LedgerError."""
    evidence.early_texts = _texts(reader.samples_of_groups(EARLY, NUM, paid=True), decode)
    evidence.late_texts = _texts(reader.samples_of_groups(LATE, NUM, paid=True), decode)
    evidence.unpaid_texts = _texts(reader.samples_of_groups(LATE, NUM, paid=False), decode)
    evidence.canary_texts = [
        text
        for name, series in evidence.canary_rewards.items()
        if (versions := [version for version, reward in series.items() if reward.earned])
        for text in earning(reader, name, max(versions), decode)
    ]


def earning(reader: LedgerReader, name: str, version: int, decode: Decode | None) -> list[ScoredText]:
    """What the model wrote of completions of an evaluation with a reward above 0, the highest first."""
    attempts = [(one.reward, one) for one in reader.attempts(name, version) if one.reward is not None]
    paid = sorted((each for each in attempts if each[0] > ABSOLUTE), key=lambda each: -each[0])
    return [
        ScoredText(one.row_id, reward, "", decode(_own(one)) if decode else "(no tokenizer.json)")
        for reward, one in paid
    ]


def _own(attempt: EvaluationAttempt) -> list[int]:
    return sampled_tokens(unmarked(attempt.tokens, 0))


def _texts(samples: list[Sample], decode: Decode) -> list[ScoredText]:
    texts = {}
    for prompt, trajectory in samples:
        completion = decode(sampled_tokens(trajectory.columns))  # not what an environment wrote
        reward = trajectory.reward or 0.0  # the query asks for rewards
        text = ScoredText(prompt.row_id, reward, prompt.text, completion, trajectory.metrics)
        texts[prompt.row_id] = text
    return list(texts.values())


class CanaryWatch:
    """A sink. It warns once for each canary of `sections` with a completion that earns what none may: more
    than 0, or with a wrong gold answer at least `correct_at`. It reads the ledger's completions then.

    A failure in here ends the watch with a warning, and not the run.
    """

    def __init__(
        self, events: Events, ledger: Path, decode: Decode | None, sections: tuple[EvaluationSection, ...]
    ) -> None:
        self._events, self._ledger, self._decode = events, ledger, decode
        self._silent = {section.name: section for section in sections if section.canary}

    def __call__(self, event: Event) -> None:
        if event.kind != "evaluated" or event.fields["name"] not in self._silent:
            return
        name, version = event.fields["name"], event.fields["version"]
        try:
            reason = self._warning(self._silent[name], version)
        except Exception as error:
            reason = f"canaries are no longer watched: {type(error).__name__}: {error}"
            self._silent.clear()
        if reason:
            self._silent.pop(name, None)
            self._events.emit("warned", source="canary", reason=reason)

    def _warning(self, section: EvaluationSection, version: int) -> str:
        with LedgerReader(self._ledger, check=False) as reader:
            texts = earning(reader, section.name, version, self._decode)
        least = section.correct_at if section.canary == "wrong-gold" else 0.0
        texts = [text for text in texts if reaches(text.reward, least)]
        if not texts:
            return ""
        chance = " With a wrong gold answer this may be chance." if section.canary == "wrong-gold" else ""
        return (
            f"canary {section.name}: at version {version}, {len(texts)} completions earn a reward that none "
            f"deserves.{chance} Row {texts[0].row_id}: reward {texts[0].reward:.3g} for "
            f"{clipped(texts[0].completion, SHOWN_CHARACTERS)!r}"
        )
