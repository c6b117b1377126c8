"""Tries a reward on answers of known worth (a right answer, none, garbage, and your own), and an environment
by one episode of given actions, without a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config.schema import Config
from millrace.controller import episode
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.completion.forks import context
from millrace.core.errors import DataError
from millrace.core.types import Abstain, Failed, Finish, Observed, Score, Scored, ScoreRequest, Trajectory
from millrace.evaluation import scoring

TEXT_SHOWN = 60
"""Characters of a reference answer in a message."""
GARBAGE = "lorem ipsum 42 )}]"


@dataclass(frozen=True)
class Trial:
    """A completion of a row: `kind` is "reference", "empty", "garbage" or "yours". The reward gets `seen`,
    the text that `text` becomes through the tokenizer. The model gets `prompt`. `full`: what the reward gives
    a reference at least, in all or for a `member` of a sum; None: nobody knows."""

    prompt: str
    prompt_tokens: int
    group_id: int
    row_id: str
    kind: str
    text: str
    tokens: list[int]
    seen: str
    full: float | None = None
    member: str = ""


def run_trials(config: Config, rows: int, own: list[str]) -> list[dict[str, Any]]:
    """The reward's answer to every trial of the first `rows` usable rows, as JSON types."""
    trials = list(make_trials(config, rows, own))
    requests = [
        ScoreRequest(index, trial.group_id, token_array(trial.tokens), Finish.STOP)
        for index, trial in enumerate(trials)
    ]
    timed = scoring.scores(config, requests)
    return [_result(trial, one) for trial, one in zip(trials, timed, strict=True)]


def make_trials(config: Config, rows: int, own: list[str]) -> Iterator[Trial]:
    """The trials of the first `rows` usable rows, in the order that training draws them."""
    from millrace.conversations.tokenizer import load_dated_tokenizer
    from millrace.rewards.reference_completions import ReferenceCompletion, told_references
    from millrace.tasks.chat import find_reference
    from millrace.tasks.parts import Parts

    tokenizer = load_dated_tokenizer(config.model.path, config.model.date)
    parts = Parts(config, tokenizer)
    for prompt in scoring.prompts(config, rows):
        part, row = parts.locate(prompt.group_id)
        task, columns = part.task, part.task.columns(row)
        texts = [("empty", ""), ("garbage", GARBAGE), *(("yours", text) for text in own)]
        tried = [(kind, ReferenceCompletion(text)) for kind, text in texts]
        answer = None if task.answer is None else find_reference(columns, task.answer)
        references = told_references(part.config.reward, answer, columns)
        tried = [*(("reference", one) for one in references), *tried]
        for kind, one in tried:
            tokens = tokenizer.encode(one.text, add_special_tokens=False)
            seen = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            of_prompt = prompt.text, len(prompt.tokens), prompt.group_id, prompt.row_id
            yield Trial(*of_prompt, kind, one.text, tokens, seen, one.full, one.member)


def judge(results: list[dict[str, Any]]) -> Iterator[str]:
    """A sentence for each result that would spoil training."""
    failed = [r for r in results if r["outcome"] == "failed"]
    if failed:
        yield f"{len(failed)} of {len(results)} calls failed, the first: {failed[0]['reason']}"
    unproven = [r["unmet"] for r in results if r.get("unmet") and r["outcome"] != "failed"]
    if unproven:
        yield f"{len(unproven)} reference answers have not full marks, the first: {unproven[0]}"
    changed = [
        r for r in results if r["kind"] in ("reference", "yours") and r["seen"] != r["completion"].strip()
    ]
    if changed:
        first = changed[0]
        yield f"the tokenizer cannot write {first['completion']!r}: the reward gets {first['seen']!r}"
    right = [r["value"] for r in results if r["kind"] == "reference" and r["value"] is not None]
    wrong = [r["value"] for r in results if r["kind"] in ("empty", "garbage") and r["value"] is not None]
    if right and wrong and max(wrong) >= min(right):
        yield f"a wrong completion gets {max(wrong):g}, a reference answer only {min(right):g}"
    if all(r["kind"] in ("empty", "garbage") for r in results):
        yield "no right answer was tried, for the task has none: give one with --completion TEXT"
        return
    values = {r["value"] for r in results if r["value"] is not None}
    if len(results) > 1 and len(failed) < len(results) and len(values) < 2:
        said = f"{values.pop():g}" if values else "no opinion"
        yield f"every completion gets {said}: nothing can be learned from that"


class TriedReference(Protocol):
    """A reference answer that was tried: see `Trial`."""

    @property
    def row_id(self) -> str: ...
    @property
    def seen(self) -> str: ...
    @property
    def full(self) -> float | None: ...
    @property
    def member(self) -> str: ...


def unmet(reference: TriedReference, score: Score) -> str | None:
    """Why a reference answer has not full marks, with its row; None: it has, or nobody knows them."""
    if reference.full is None or isinstance(score, Abstain):
        return None
    where = f"{reference.row_id}: {reference.member + ': ' if reference.member else ''}"
    if isinstance(score, Failed):
        is_another = reference.member and not score.reason.startswith(f"{reference.member}: ")
        return None if is_another else f"{reference.row_id}: {score.reason}"
    value = score.metrics.get(reference.member) if reference.member else score.value
    if value is None or value >= reference.full:
        return None
    return f"{where}{reference.seen[-TEXT_SHOWN:]!r} gets {value:g}, not {reference.full:g}"


def _result(trial: Trial, timed: Any) -> dict[str, Any]:
    score = timed.score
    return {
        "row": trial.row_id,
        "kind": trial.kind,
        "prompt": trial.prompt,
        "prompt_tokens": trial.prompt_tokens,
        "completion": trial.text,
        "seen": trial.seen.strip(),
        "unmet": unmet(trial, score),
        "outcome": type(score).__name__.lower(),
        "value": score.value if isinstance(score, Scored) else None,
        "metrics": score.metrics if isinstance(score, Scored) else {},
        "reason": score.reason if isinstance(score, (Failed, Abstain)) else "",
        "seconds": timed.seconds,
    }


# ---------------------------------------------------------------- an episode of given actions


def play(config: Config, actions: Sequence[str]) -> dict[str, Any]:
    """One episode on the first usable row, as JSON types, in the reward worker of a run.

    `turns`: each with the action, the answer, their tokens, and the reward of the turn or None. `outcome`:
    "scored", "failed", "abstain", or "observed" if the actions are used up before the episode ends.
    """
    from millrace.conversations.tokenizer import load_dated_tokenizer

    tokenizer = load_dated_tokenizer(config.model.path, config.model.date)
    prompt = scoring.prompts(config, 1)[0]
    one = Trajectory(0, prompt.group_id)
    turns: list[dict[str, Any]] = []
    end: Any = Observed(token_array())
    most = config.rollout.max_sequence_tokens
    asked = prompt.tokens, prompt.row_digest
    with scoring.Scorer(config) as scorer:
        if config.own_prompts:
            episode.begin(one)
            begun = scorer.scores([episode.request(one, *asked, max_sequence_tokens=most)])[0].score
            if not isinstance(begun, Observed):
                raise DataError(f"{prompt.row_id}: {getattr(begun, 'reason', begun)}")
            episode.observe(one, begun)
        for action in actions:
            sampled = [*tokenizer.encode(action, add_special_tokens=False), tokenizer.eos_token_id]
            one.columns.extend(TokenColumns.of(sampled, [0.0] * len(sampled), 0))
            episode.end_turn(one, Finish.STOP, answered=True)
            timed = scorer.scores([episode.request(one, *asked, max_sequence_tokens=most)])[0]
            end = timed.score
            observed = list(end.tokens) if isinstance(end, Observed) else []
            if isinstance(end, Observed):
                episode.observe(one, end)
            turns.append(
                {
                    "action": action,
                    "action_tokens": sampled,
                    "answer": tokenizer.decode(observed),
                    "answer_tokens": observed,
                    "reward": getattr(end, "metrics", {}).get(f"turn_{len(turns) + 1}"),
                    "seconds": timed.seconds,
                }
            )
            if not isinstance(end, Observed):
                break
    seen = context(prompt.tokens, one.columns.tokens, one.columns.forks, one.columns.prompt_end)
    return {
        "row": prompt.row_id,
        "prompt": tokenizer.decode(seen) if one.columns.prompt_end else prompt.text,
        "prompt_tokens": list(seen),
        "turns": turns,
        "outcome": type(end).__name__.lower(),
        "value": end.value if isinstance(end, Scored) else None,
        "metrics": getattr(end, "metrics", {}),
        "reason": end.reason if isinstance(end, Failed | Abstain) else "",
    }
