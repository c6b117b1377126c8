"""How much a run waits for its environments, and how much they write."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.core.events import Event


@dataclass(slots=True)
class EnvironmentUse:
    """A sink. An answer takes from the end of a turn until its observation is recorded: with the wait for a
    worker. The last answer of an episode is its score, and does not count here."""

    num_answers: int = 0
    answer_s: float = 0.0  # of all answers
    turn_s: float = 0.0  # from the lease to the end, of all complete turns
    observed_tokens: int = 0
    sampled_tokens: int = 0  # of complete turns
    _leased: dict[int, float] = field(default_factory=dict)
    _ended: dict[int, tuple[float, int]] = field(default_factory=dict)  # turns: when, tokens so far
    _begun: dict[int, int] = field(default_factory=dict)  # turns: tokens before them

    def __call__(self, event: Event) -> None:
        match event.kind:
            case "run_started":
                for turns in self._leased, self._ended, self._begun:
                    turns.clear()
            case "leased":
                for tid in event.fields["trajectory_ids"]:
                    self._leased.setdefault(tid, event.time_s)
            case "finished":
                tid, tokens = event.fields["trajectory_id"], event.fields["tokens"]
                self.sampled_tokens += tokens - self._begun.pop(tid, 0)
                self.turn_s += event.time_s - self._leased.pop(tid, event.time_s)
                self._ended[tid] = event.time_s, tokens
            case "observed":
                self._answered(event.fields["trajectory_id"], event.fields["tokens"], event.time_s)
            case "scored" | "ended" | "restarted":
                tid = event.fields["trajectory_id"]
                for turns in self._leased, self._ended, self._begun:
                    turns.pop(tid, None)

    def _answered(self, trajectory_id: int, tokens: int, time_s: float) -> None:
        ended_s, before = self._ended.pop(trajectory_id, (time_s, 0))
        self.num_answers += 1
        self.answer_s += time_s - ended_s
        self.observed_tokens += tokens
        self._begun[trajectory_id] = before + tokens

    @property
    def num_waiting(self) -> int:
        """Complete turns that wait for an answer or a reward."""
        return len(self._ended)

    @property
    def mean_answer_s(self) -> float | None:
        return self.answer_s / self.num_answers if self.num_answers else None

    @property
    def observed_share(self) -> float:
        """The share of observed tokens of all tokens."""
        return self.observed_tokens / max(1, self.observed_tokens + self.sampled_tokens)

    @property
    def waiting_share(self) -> float | None:
        """The share of the time of complete turns and answers in which turns waited for answers."""
        total_s = self.answer_s + self.turn_s
        return self.answer_s / total_s if self.num_answers and total_s else None

    def take_scalars(self) -> dict[str, float]:
        """Scalars of the time since the last call. Empty: no environment answered."""
        if not self.num_answers:
            return {}
        scalars = {
            "environment/answers": float(self.num_answers),
            "environment/answer_s": self.answer_s / self.num_answers,
            "environment/observed_share": self.observed_share,
            "environment/waiting": float(self.num_waiting),
        }
        self.num_answers = self.observed_tokens = self.sampled_tokens = 0
        self.answer_s = self.turn_s = 0.0
        return scalars
