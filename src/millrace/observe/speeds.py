"""Tokens per second of a run: one definition for panel, page, summary and report."""

from __future__ import annotations

from millrace.core.events import Event

TRAINED = "Tokens of all steps, over the time from the start of the first step to the end of the last step."
GENERATED = (
    "Tokens that the replicas generated, over the time from the start of the first replica to the last "
    "report of more tokens."
)


class Rate:
    """Tokens over their time. A pause between two sessions does not count."""

    def __init__(self) -> None:
        self._tokens, self._took_s = 0, 0.0
        self._until_s: float | None = None

    def begin_session(self) -> None:
        self._until_s = None

    def add(self, tokens: int, at_s: float, took_s: float) -> None:
        """`took_s` counts for the first call of a session. Later calls count the time since the call
        before."""
        self._tokens += tokens
        self._took_s += took_s if self._until_s is None else at_s - self._until_s
        self._until_s = at_s

    @property
    def per_s(self) -> float | None:
        return self._tokens / self._took_s if self._took_s > 0 else None


class Speeds:
    """A sink of all sessions of a run. A replayed step counts once."""

    def __init__(self) -> None:
        self.trained, self.generated = Rate(), Rate()
        self._totals: dict[str, int] = {}  # by replica: tokens since its start

    def __call__(self, event: Event) -> None:
        fields = event.fields
        match event.kind:
            case "run_started":
                self.trained.begin_session()
                self.generated.begin_session()
            case "step" if not fields.get("replayed"):
                self.trained.add(fields["trained_tokens"], event.time_s, fields["step_s"])
            case "report":
                before, total = self._totals.get(fields["replica"], 0), fields["generated_tokens"]
                self._totals[fields["replica"]] = total
                if more := total - before if total >= before else total:  # less: another incarnation
                    self.generated.add(more, event.time_s, fields["busy_s"] + fields["idle_s"])
