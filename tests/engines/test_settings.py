"""A log-prob is of the distribution that its token was drawn from, whatever `sampling` says, or the setting
is refused at the start."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bench import END, TOLERANCE, VOCAB, Bench, OpenBench, Played, prompt_of
from msgspec.structs import replace
from tests.long import few

from millrace.config.schema import Config
from millrace.core.errors import ConfigError, DataError
from millrace.core.types import Finish, Sampling
from millrace.rollout.engine_kinds import refuse_unable
from millrace.rollout.protocol import Capabilities

pytestmark = pytest.mark.computed

TRAJECTORIES, LENGTH = 48, 40
ODD = tuple(range(5, VOCAB, 2))

FULL: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "no end": {"ignore_eos": True},
    "repetition": {"repetition_penalty": 1.5},
    "less repetition than 1": {"repetition_penalty": 0.8, "temperature": 0.8},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.7},
    "all penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.5},
}
"""Every token can come: the importance ratio of the trainer's distribution has the mean 1."""

CUT: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1, "temperature": 1.3},
    "all three": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.2},
    "allowed": {"allowed_token_ids": (END, *ODD)},
    "banned": {"banned_token_ids": (END, *ODD)},
    "everything": {
        "top_k": 20, "min_p": 0.01, "top_p": 0.95, "temperature": 0.9, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.1, "banned_token_ids": (7, 9),
    },
}  # fmt: skip
"""Some cannot: the trainer's distribution over those that can has that mean."""


def accepted(kind: str, can: Capabilities, settings: dict[str, Any]) -> bool:
    """Whether the engine's capabilities cover the settings; if not, a run with them must be refused."""
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    asked = {"model": {"path": "m"}, "task": task, "reward": reward, "sampling": settings}
    engine, program = ("server", "SGLang") if kind == "sglang" else (kind, None)
    config = Config.model_validate(asked).model_copy(
        update={"rollout": Config.model_validate(asked).rollout.model_copy(update={"engine": engine})}
    )
    known = {f"sampling.{key}" for key in settings} - {"sampling.temperature"}
    if known <= can.settings:
        refuse_unable(config, program)
        return True
    with pytest.raises(ConfigError, match="cannot do"):
        refuse_unable(config, program)
    return False


@pytest.mark.parametrize("name", few(FULL | CUT, 6))
def test_logprobs_are_of_what_was_sampled_from(
    name: str, kind: str, can: Capabilities, bench_of: OpenBench
) -> None:
    settings = (FULL | CUT)[name]
    if not accepted(kind, can, settings):
        return
    bench, sampling = bench_of(slots=24), Sampling(max_tokens=LENGTH, **settings)
    version = bench.serve(1)
    partial = (prompt_of(9, 6), [])  # some go on from tokens of another engine
    works = [
        bench.work(prompt_of(i % 6, 4 + i % 6), sampling, group_id=i % 6, tokens=partial[i % 5 > 0])
        for i in range(TRAJECTORIES)
    ]  # and some of these are at the beginning of a later turn
    later = [replace(work, turn_start=len(work.tokens) * (i % 2)) for i, work in enumerate(works)]
    played = bench.play(later)
    ratios = []
    for one in played:
        logits = bench.logits(version, one)
        expected, gaps = nearest(logits, one)
        assert gaps.max() < TOLERANCE, (name, gaps.max())
        ratios += ratio(logits, expected, one)
    error = np.std(ratios) / math.sqrt(len(ratios))
    assert abs(np.mean(ratios) - 1) < 4 * error + 1e-5, (np.mean(ratios), error)


def nearest(logits: torch.Tensor, one: Played) -> tuple[torch.Tensor, torch.Tensor]:
    """`distribution`, and how far the recorded log-probs are from it. A token at the very edge of top-p is in
    or out by rounding, so each position may have either."""
    edges = [distribution(logits, one, edge) for edge in (0.0, -1e-5, 1e-5)]
    tokens, recorded = torch.tensor(one.tokens)[:, None], torch.tensor(one.columns.logprobs)
    gaps = torch.stack([(each.gather(1, tokens)[:, 0] - recorded).abs() for each in edges])
    best = gaps.argmin(0)
    return torch.stack(edges)[best, torch.arange(len(best))], gaps.amin(0)


def distribution(logits: torch.Tensor, one: Played, edge: float = 0.0) -> torch.Tensor:
    """Log-probs (tokens, vocabulary) that the settings ask for: token by token, as their names say."""
    rows, s = [], one.work.sampling
    s = replace(s, top_p=s.top_p + edge) if s.top_p < 1 else s
    banned = torch.zeros(VOCAB, dtype=torch.bool)
    banned[[i for i in range(VOCAB) if i not in (s.allowed_token_ids or range(VOCAB))]] = True
    banned[list(s.banned_token_ids)] = True
    for index, row in enumerate(logits.double()):
        past, turn = one.work.tokens[: one.work.turn_start], one.work.tokens[one.work.turn_start :]
        count = torch.tensor([*turn, *one.tokens[:index]], dtype=torch.long).bincount(minlength=VOCAB)
        seen = count + torch.tensor([*one.work.prompt, *past]).bincount(minlength=VOCAB) > 0
        r = torch.where(row > 0, 1 / s.repetition_penalty, s.repetition_penalty)
        edited = torch.where(seen, row * r, row)
        edited = edited - s.frequency_penalty * count - s.presence_penalty * (count > 0)
        rows.append(truncated(edited.masked_fill(banned, -math.inf) / s.temperature, s))
    return torch.stack(rows)


def truncated(scaled: torch.Tensor, s: Sampling) -> torch.Tensor:
    probs, order = scaled.softmax(-1).sort(descending=True)
    kept = int((probs >= s.min_p * probs[0]).sum()) if s.min_p else VOCAB
    kept = min(kept, s.top_k or VOCAB)
    probs = probs[:kept] / probs[:kept].sum()
    if s.top_p < 1:
        kept = int((probs.cumsum(0) - probs < s.top_p).sum())
        probs = probs[:kept] / probs[:kept].sum()
    return torch.full_like(scaled, -math.inf).scatter(0, order[:kept], probs.log())


def ratio(logits: torch.Tensor, drawn_from: torch.Tensor, one: Played) -> list[float]:
    """Importance ratios of the trainer's distribution, over the tokens that could come."""
    trainers = logits.double() / one.work.sampling.temperature
    over = trainers.masked_fill(drawn_from.isinf(), -math.inf).log_softmax(-1)
    mine = over.gather(1, torch.tensor(one.tokens)[:, None])[:, 0] - torch.tensor(one.columns.logprobs)
    return mine.exp().tolist()


def test_each_of_several_end_tokens_stops(bench_of: OpenBench, can: Capabilities) -> None:
    if "sampling.stop_token_ids" not in can.settings:
        pytest.skip("refused")
    bench, ends = bench_of(), (END, *range(40, 50))
    bench.serve(1)
    sampling = Sampling(max_tokens=LENGTH, stop_token_ids=ends[1:])
    played = bench.play(bench.work([5, 6], sampling) for _ in range(24))
    assert len({one.tokens[-1] for one in played if one.finish is Finish.STOP}) > 2
    check_ends(bench, played, ends)


def test_without_the_end_token_only_the_others_and_the_budget_end_it(
    bench_of: OpenBench, can: Capabilities
) -> None:
    if not {"sampling.stop_token_ids", "sampling.ignore_eos"} <= can.settings:
        pytest.skip("refused")
    bench = bench_of()
    bench.serve(1)
    sampling = Sampling(max_tokens=120, stop_token_ids=(40,), ignore_eos=True)
    played = bench.play(bench.work([5, 6], sampling) for _ in range(24))
    assert any(END in one.tokens for one in played)
    check_ends(bench, played, (40,))


def check_ends(bench: Bench, played: list[Played], ends: tuple[int, ...]) -> None:
    for one in played:
        assert not set(one.tokens[:-1]) & set(ends)
        assert (one.finish is Finish.STOP) == (one.tokens[-1] in ends)
    bench.check(played)


def test_tokens_that_the_model_does_not_have_are_refused(bench_of: OpenBench, can: Capabilities) -> None:
    bench = bench_of()
    bench.serve(1)
    for setting in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
        if f"sampling.{setting}" in can.settings:
            with pytest.raises(DataError, match=r"`sampling` names tokens outside \[0, 128\)"):
                bench.submit([bench.work([5], Sampling(max_tokens=3, **{setting: (5, VOCAB)}))])
