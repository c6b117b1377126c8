"""Does an engine sample as it says? A few hundred tokens before a replica's first trajectory tell.

**Questions.** For each of a few random prompts, the first token of some trajectories. A probe's trajectories
have negative ids, so no trajectory of a run has their noise or their lease.

**Bets.** How sure chance can be excluded. Every bound holds for any distribution and any number of draws. A
bet against a claimed distribution p names other probabilities q before each draw, and multiplies its capital
by q(x) / p(x) for the token x that is drawn. If tokens are drawn from p, the expected capital stays at most
1. So it reaches 1 / a with a probability of at most a (Ville's inequality; Shafer, 2021, "Testing by
betting"). Capital is given as its natural logarithm.

**Faults.** There are two kinds of rules. Log-probs obey arithmetic: those of a temperature follow from those
of another. Such a rule allows for rounding, on average over tokens. Draws obey chance: an honest engine
breaks any of these rules with a probability of `FALSE_ALARM` at most.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from millrace.core import progress
from millrace.core.completion.columns import token_array
from millrace.core.errors import DeadlineExceeded, SamplingError
from millrace.core.types import Progress, ReplicaLoad, Sampling, Work
from millrace.rollout.engine_kinds import ENGINES
from millrace.rollout.protocol import Engine, EngineOptions

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


# ---------------------------------------------------------------- questions


PROMPTS, PROMPT_TOKENS = 4, 8
COLD = 0.5
"""A temperature at which a distribution is clearly another than at 1."""


class Question(NamedTuple):
    """`draws`: trajectories of each prompt. Questions with equal `noise` and `seed` have equal noise. The
    questions of one `round` are asked together. `top_k` -1: the size of the vocabulary."""

    name: str
    draws: int
    round: int
    temperature: float = 1.0
    top_k: int = 0
    noise: int = 0
    seed: int = 0


PLAIN = Question("plain", 32, 0)
COLDER = Question("cold", 16, 0, temperature=COLD, noise=1)
GREEDY = Question("greedy", 1, 0, temperature=0.0, noise=2)
AGAIN = Question("again", 12, 1)
OTHER_SEED = Question("other seed", 12, 2, seed=1)
ALL = Question("top_k all", 12, 3, top_k=-1)
TWO = Question("top_k 2", 12, 3, top_k=2, noise=1)

_BLOCK = 1000  # ids of one noise, far more than its trajectories


def questions(*, seeded: bool, cuts: bool) -> list[Question]:
    """Those that an engine can answer. `seeded`: trajectories have noise of their own. `cuts`: it knows
    `sampling.top_k`."""
    return [PLAIN, COLDER, GREEDY, *[AGAIN, OTHER_SEED] * seeded, *[ALL, TWO] * cuts]


_LEASES = count()  # of this process: an engine takes each lease once


def works(question: Question, vocabulary: int) -> Iterator[Work]:
    """The works of a question. They are in the order of prompts, each with its draws."""
    lease = next(_LEASES)
    for prompt, tokens in enumerate(prompts(vocabulary)):
        for draw in range(question.draws):
            sampling = Sampling(
                max_tokens=1,
                temperature=question.temperature,
                top_k=vocabulary if question.top_k < 0 else question.top_k,
                ignore_eos=True,
                token_masks=False,
            )
            yield Work(
                trajectory_id=-1 - (question.noise * _BLOCK + prompt * PLAIN.draws + draw),
                group_id=-1 - prompt,
                lease=lease,
                prompt=token_array(tokens),
                tokens=token_array(),
                sampling=sampling,
                seed=question.seed,
            )


def prompts(vocabulary: int) -> list[list[int]]:
    """Fixed random tokens: what follows them is seldom certain."""
    shape = (PROMPTS, PROMPT_TOKENS)
    drawn: list[list[int]] = np.random.default_rng(0).integers(0, vocabulary, shape).tolist()
    return drawn


# ---------------------------------------------------------------- bets


Draw = tuple[int, float]
"""A sampled token, and its log-prob as the engine says."""

_PRIOR = 4.0  # draws after which a bet on repeats trusts what it has seen as much as the claim

_RATIO_MAX = 700.0  # the exponential of more is no float


def repeats(draws: Sequence[Draw]) -> float:
    """The capital of a bet that the tokens so far come again, more often than p says."""
    seen, capital = Counter[int](), 0.0
    for number, (token, logprob) in enumerate(draws):
        weight = number / (number + _PRIOR)
        share = math.log(seen[token] / number) if seen[token] else -math.inf
        capital += _stake(weight, share, logprob)
        seen[token] += 1
    return capital


def rival(draws: Sequence[Draw], rival_logprobs: Sequence[float]) -> float:
    """The capital of a bet on a distribution in which the draws have these log-probs."""
    pairs = zip(draws, rival_logprobs, strict=True)
    return sum(_stake(0.5, rival_logprob, logprob) for (_, logprob), rival_logprob in pairs)


def _stake(weight: float, rival_logprob: float, logprob: float) -> float:
    """The growth of the capital when `weight` of it is bet on the rival and the rest on p."""
    return math.log(weight * math.exp(min(rival_logprob - logprob, _RATIO_MAX)) + 1.0 - weight)


def too_many(misses: int, trials: int, rate: float, chance: float) -> bool:
    """Whether `misses` of `trials` have at most this `chance` if each has a probability of at most `rate`.
    By Chernoff's bound: exp(-trials * KL(misses / trials || rate))."""
    share = misses / trials
    if share <= rate:
        return False
    distance = share * math.log(share / rate)
    distance += (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
    return trials * distance >= -math.log(chance)


# ---------------------------------------------------------------- faults


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
    for plain, cold in _prompts(tables, PLAIN, COLDER):
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
    for plain, greedy in _prompts(tables, PLAIN, GREEDY):
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
    for one, cold, greedy in zip(*(tables[q.name] for q in (PLAIN, COLDER, GREEDY)), strict=True):
        plain = greedy | one
        shared = [plain[token] - COLD * cold[token] for token in plain.keys() & cold.keys()]
        constants.append(fmean(shared) if shared else math.nan)
    return constants


def _draws(answers: Answers, constants: Sequence[float], tolerance: float, vocabulary: int) -> Iterator[str]:
    """Tokens come as often as their log-probs say, at both temperatures. Rounding makes rivals improbable."""

    def at_other(question: Question, logprob: float, constant: float) -> float:
        if math.isnan(constant):
            return -math.inf
        if question is COLDER:
            return COLD * logprob + constant - tolerance
        return (logprob - constant - tolerance) / COLD

    for question, other in ((PLAIN, COLDER), (COLDER, PLAIN)):
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
    if ALL.name not in answers:
        return
    gaps = [
        plain[token] - whole[token]
        for plain, whole in _prompts(tables, PLAIN, ALL)
        for token in plain.keys() & whole.keys()
    ]
    if (gap := _mean_size(gaps)) > tolerance:
        yield (
            f"`top_k` 0 and the size of the vocabulary are not the same: log-probs are {gap:.3g} nats apart, "
            f"and rounding explains {tolerance:g}"
        )
    if AGAIN.name in answers and (misses := _changed(answers, ALL)):  # it has noise by seed
        yield f"`top_k` 0 and the size of the vocabulary are not the same: with equal noise {misses}"
    yield from _two(tables, tolerance)


def _two(tables: Tables, tolerance: float) -> Iterator[str]:
    """With `top_k` 2 no third token comes, unless it is as likely as the second. The log-prob of the first is
    at most what two tokens leave it."""
    thirds, excess = list[float](), list[float]()
    for plain, two in _prompts(tables, PLAIN, TWO):
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
    if AGAIN.name not in answers:
        return
    if misses := _changed(answers, AGAIN):
        yield f"seeds do not count: with equal seeds {misses}"
    pairs = _pairs(answers, OTHER_SEED)
    surprise = -sum(logprob for _, (_, logprob) in pairs)
    if all(one[0] == other[0] for one, other in pairs) and surprise >= -math.log(_CHANCE):
        yield (
            f"seeds do not count: with another seed of the run all {len(pairs)} tokens are the same. Chance "
            f"does this once in 1e{surprise / math.log(10):.0f} times"
        )


def _changed(answers: Answers, question: Question) -> str:
    """How many draws differ that have the noise of `PLAIN`, if rounding does not explain so many."""
    pairs = _pairs(answers, question)
    misses = sum(one[0] != other[0] for one, other in pairs)
    if not too_many(misses, len(pairs), NEARLY_TIED, _CHANCE):
        return ""
    return f"{misses} of {len(pairs)} tokens differ, and near ties explain 1 in {1 / NEARLY_TIED:.0f}"


def _pairs(answers: Answers, question: Question) -> list[tuple[Draw, Draw]]:
    drawn = zip(answers[PLAIN.name], answers[question.name], strict=True)
    return [pair for plain, other in drawn for pair in zip(plain, other, strict=False)]


# ---------------------------------------------------------------- both


def _prompts(tables: Tables, one: Question, other: Question) -> Iterator[tuple[Table, Table]]:
    return zip(tables[one.name], tables[other.name], strict=True)


def _mean_size(numbers: Sequence[float]) -> float:
    return fmean(map(abs, numbers)) if numbers else 0.0
