"""The faults in an engine's answers to the probe. Pure.

There are two kinds of rules. Log-probs obey arithmetic: those of a temperature follow from those of another.
Such a rule allows for rounding, on average over tokens. Draws obey chance: an honest engine breaks any of
these rules with a probability of `FALSE_ALARM` at most.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from millrace.rollout.sampling_probe import probe_questions as asked
from millrace.rollout.sampling_probe.bets import Draw, repeats, rival, too_many
from millrace.rollout.sampling_probe.probe_questions import COLD

FALSE_ALARM = 1e-6
"""The probability that an honest engine fails, for all rules about draws together."""
_RULES_OF_DRAWS = 9
_CHANCE = FALSE_ALARM / _RULES_OF_DRAWS

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.3}
"""In nats: rounding changes a log-prob by less on average, between two steps of one engine."""
NEARLY_TIED = 0.1
"""Rounding changes fewer of the draws with equal noise: two tokens were nearly tied."""

Answers = Mapping[str, Sequence[Sequence[Draw]]]
"""By question: of each prompt, its draws in order."""
Table = dict[int, float]
"""Of one prompt: the log-prob of each token that was drawn, as a mean."""


def faults(answers: Answers, *, vocabulary: int, tolerance: float) -> list[str]:
    """Sentences without a full stop. None: nothing shows that the engine samples otherwise than it says."""
    tables = {name: [_table(draws) for draws in drawn] for name, drawn in answers.items()}
    rules = [
        _temperatures(tables, tolerance),
        _greedy(tables, tolerance),
        _draws(answers, _constants(tables), tolerance, vocabulary),
        _top_k(answers, tables, tolerance),
        _seeds(answers),
    ]
    return [fault for rule in rules for fault in rule]


def _table(draws: Sequence[Draw]) -> Table:
    said = defaultdict[int, list[float]](list)
    for token, logprob in draws:
        said[token].append(logprob)
    return {token: fmean(logprobs) for token, logprobs in said.items()}


Tables = Mapping[str, Sequence[Table]]


# ---------------------------------------------------------------- log-probs


def _temperatures(tables: Tables, tolerance: float) -> Iterator[str]:
    """log p at temperature T is log p at 1, divided by T, less a constant of the prompt."""
    off, apart = list[float](), list[float]()
    for plain, cold in _prompts(tables, asked.PLAIN, asked.COLDER):
        shared = sorted(plain.keys() & cold.keys())
        if len(shared) > 1:
            centre, cold_centre = fmean(plain[t] for t in shared), fmean(cold[t] for t in shared)
            off += [COLD * (cold[t] - cold_centre) - (plain[t] - centre) for t in shared]
            apart += [plain[t] - centre for t in shared]
    if (gap := _mean_size(off)) > tolerance:
        yield (
            f"log-probs at temperature {COLD} do not follow from those at 1: {len(off)} of them are off by "
            f"{gap:.3g} nats on average, where {_mean_size(apart) * (1 - COLD):.3g} would show a temperature "
            f"that is ignored, and rounding explains {tolerance:g}"
        )


def _greedy(tables: Tables, tolerance: float) -> Iterator[str]:
    """At temperature 0 the token is the most likely one, and its log-prob is that at temperature 1."""
    gaps = list[float]()
    for plain, greedy in _prompts(tables, asked.PLAIN, asked.GREEDY):
        [(best, logprob)] = greedy.items()
        gaps.append(max([*plain.values(), logprob]) - logprob)
        gaps[-1] = max(gaps[-1], abs(plain.get(best, logprob) - logprob))
    if (gap := _mean_size(gaps)) > tolerance:
        yield (
            "the log-probs of the most likely tokens, drawn at temperature 0, and of draws at temperature 1 "
            f"are not of one distribution: they are off by {gap:.3g} nats, and rounding explains "
            f"{tolerance:g}"
        )


# ---------------------------------------------------------------- draws


def _constants(tables: Tables) -> list[float]:
    """Of each prompt, log p at temperature 1 less `COLD` times log p at `COLD`: equal for all of its tokens.
    NaN: no token was drawn at both."""
    constants = []
    for one, cold, greedy in zip(
        *(tables[q.name] for q in (asked.PLAIN, asked.COLDER, asked.GREEDY)), strict=True
    ):
        plain = greedy | one
        shared = [plain[token] - COLD * cold[token] for token in plain.keys() & cold.keys()]
        constants.append(fmean(shared) if shared else math.nan)
    return constants


def _draws(answers: Answers, constants: Sequence[float], tolerance: float, vocabulary: int) -> Iterator[str]:
    """Tokens come as often as their log-probs say, at both temperatures. Rounding makes rivals improbable."""

    def at_other(question: asked.Question, logprob: float, constant: float) -> float:
        if math.isnan(constant):
            return -math.inf
        if question is asked.COLDER:
            return COLD * logprob + constant - tolerance
        return (logprob - constant - tolerance) / COLD

    for question, other in ((asked.PLAIN, asked.COLDER), (asked.COLDER, asked.PLAIN)):
        drawn = answers[question.name]
        bets = {
            "the same tokens come again and again": sum(map(repeats, drawn)),
            f"they come as at temperature {other.temperature:g}": sum(
                rival(draws, [at_other(question, logprob, constant) for _, logprob in draws])
                for draws, constant in zip(drawn, constants, strict=True)
            ),
            "improbable tokens come too often": sum(
                rival(draws, [-math.log(vocabulary)] * len(draws)) for draws in drawn
            ),
        }
        for what, capital in bets.items():
            if capital >= -math.log(_CHANCE):
                yield (
                    f"draws at temperature {question.temperature:g} do not follow their log-probs: {what}. "
                    f"Chance does this once in 1e{capital / math.log(10):.0f} times. {_entropy(drawn)}; "
                    f"{_most_striking(drawn)}"
                )


def _entropy(drawn: Sequence[Sequence[Draw]]) -> str:
    """What was drawn beside what is said of it."""
    shares = [count / len(draws) for draws in drawn for count in Counter(t for t, _ in draws).values()]
    entropy = -sum(share * math.log(share) for share in shares) / len(drawn)
    said = -fmean(logprob for draws in drawn for _, logprob in draws)
    return f"The draws have an entropy of {entropy:.3g} nats, and their mean log-prob is -{said:.3g}"


def _most_striking(drawn: Sequence[Sequence[Draw]]) -> str:
    counts = {
        (prompt, token): (count, len(draws), math.exp(_table(draws)[token]))
        for prompt, draws in enumerate(drawn)
        for token, count in Counter(token for token, _ in draws).items()
    }
    (_, token), (count, most, p) = max(counts.items(), key=lambda item: item[1][0] - item[1][1] * item[1][2])
    return f"token {token} came {count} times in {most}, and its log-prob says {p:.2g}"


# ---------------------------------------------------------------- top_k


def _top_k(answers: Answers, tables: Tables, tolerance: float) -> Iterator[str]:
    if asked.ALL.name not in answers:
        return
    gaps = [
        plain[token] - whole[token]
        for plain, whole in _prompts(tables, asked.PLAIN, asked.ALL)
        for token in plain.keys() & whole.keys()
    ]
    if (gap := _mean_size(gaps)) > tolerance:
        yield (
            f"`top_k` 0 and the size of the vocabulary are not the same: log-probs are {gap:.3g} nats apart, "
            f"and rounding explains {tolerance:g}"
        )
    if asked.AGAIN.name in answers and (misses := _changed(answers, asked.ALL)):  # it has noise by seed
        yield f"`top_k` 0 and the size of the vocabulary are not the same: with equal noise {misses}"
    yield from _two(tables, tolerance)


def _two(tables: Tables, tolerance: float) -> Iterator[str]:
    """With `top_k` 2 no third token comes, unless it is as likely as the second. The log-prob of the first is
    at most what two tokens leave it."""
    thirds, excess = list[float](), list[float]()
    for plain, two in _prompts(tables, asked.PLAIN, asked.TWO):
        ranked = sorted(two.values(), reverse=True)
        thirds.append(ranked[1] - ranked[2] if len(ranked) > 2 else 0.0)
        for token in plain.keys() & two.keys():
            rest = max((logprob for other, logprob in plain.items() if other != token), default=-math.inf)
            excess.append(max(0.0, two[token] + math.log1p(math.exp(rest - plain[token]))))
    if max(thirds) > 2 * tolerance:
        yield (
            f"`top_k` 2 leaves more than two tokens: a third one came, {max(thirds):.3g} nats less likely "
            "than the second"
        )
    if excess and (gap := fmean(excess)) > tolerance:
        yield f"`top_k` 2 leaves fewer than two tokens: log-probs are {gap:.3g} nats too high"


# ---------------------------------------------------------------- seeds


def _seeds(answers: Answers) -> Iterator[str]:
    if asked.AGAIN.name not in answers:
        return
    if misses := _changed(answers, asked.AGAIN):
        yield f"seeds do not count: with equal seeds {misses}"
    pairs = _pairs(answers, asked.OTHER_SEED)
    surprise = -sum(logprob for _, (_, logprob) in pairs)
    if all(one[0] == other[0] for one, other in pairs) and surprise >= -math.log(_CHANCE):
        yield (
            f"seeds do not count: with another seed of the run all {len(pairs)} tokens are the same. Chance "
            f"does this once in 1e{surprise / math.log(10):.0f} times"
        )


def _changed(answers: Answers, question: asked.Question) -> str:
    """How many draws differ that have the noise of `PLAIN`, if rounding does not explain so many."""
    pairs = _pairs(answers, question)
    misses = sum(one[0] != other[0] for one, other in pairs)
    if not too_many(misses, len(pairs), NEARLY_TIED, _CHANCE):
        return ""
    return f"{misses} of {len(pairs)} tokens differ, and near ties explain 1 in {1 / NEARLY_TIED:.0f}"


def _pairs(answers: Answers, question: asked.Question) -> list[tuple[Draw, Draw]]:
    drawn = zip(answers[asked.PLAIN.name], answers[question.name], strict=True)
    return [pair for plain, other in drawn for pair in zip(plain, other, strict=False)]


# ---------------------------------------------------------------- both


def _prompts(tables: Tables, one: asked.Question, other: asked.Question) -> Iterator[tuple[Table, Table]]:
    return zip(tables[one.name], tables[other.name], strict=True)


def _mean_size(numbers: Sequence[float]) -> float:
    return fmean(map(abs, numbers)) if numbers else 0.0
