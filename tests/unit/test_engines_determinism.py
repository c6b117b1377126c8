"""What a trajectory gets does not depend on where, when and with whom it is computed.

What holds for an exact engine (`engines.own.accelerated.exact`): tokens and log-probs are equal bit for
bit whatever a trajectory is batched with, however its prompt is chunked or shared, and wherever it is resumed
from partial tokens.
"""

from __future__ import annotations

import random

import pytest
from engine_models import CONFIGS, make_exact_engine, make_model, make_work, prompt_of, run
from tests.long import few

from millrace.core.types import Sampling, Work

SAMPLINGS = (
    Sampling(max_tokens=200),
    Sampling(max_tokens=90, temperature=0.8, top_p=0.95),
    Sampling(max_tokens=60, temperature=1.2, top_k=7),
    Sampling(max_tokens=40, temperature=0),
)


def works() -> list[Work]:
    """Eight groups of three, prompts from 1 to 260 tokens (beyond one block of attention)."""
    lengths = (1, 3, 17, 40, 64, 100, 190, 260)
    return [
        make_work(i, prompt_of(i // 3, lengths[i // 3]), SAMPLINGS[i % 4], group_id=i // 3) for i in range(24)
    ]


def options(slots: int, prefill_chunk: int) -> dict[str, int]:
    return {"slots": slots, "prefill_chunk": prefill_chunk, "max_sequence_tokens": 400}


@pytest.mark.parametrize("name", few(CONFIGS, 3))
def test_batching_and_chunking_do_not_change_a_bit(name: str) -> None:
    model = make_model(name, scale=1.2)
    together = run(make_exact_engine(model, **options(24, 512)), works())
    shuffled = random.Random(0).sample(works(), 24)
    assert run(make_exact_engine(model, **options(5, 16)), shuffled) == together


def test_a_trajectory_alone_equals_itself_in_a_batch() -> None:
    model = make_model(scale=1.2)
    together = run(make_exact_engine(model, **options(24, 512)), works())
    for work in (works()[0], works()[13], works()[23]):
        assert (
            run(make_exact_engine(model, **options(1, 512)), [work])[work.trajectory_id]
            == together[work.trajectory_id]
        )


def test_resuming_elsewhere_from_partial_tokens_does_not_change_a_bit() -> None:
    model = make_model(scale=1.2)
    whole = run(make_exact_engine(model, **options(24, 512)), works())
    cuts = {key: random.Random(key).randrange(len(tokens)) for key, (tokens, _, _) in whole.items()}
    resumed = [
        make_work(
            w.trajectory_id, w.prompt, w.sampling, group_id=w.group_id, tokens=whole[w.trajectory_id][0][:cut]
        )
        for w in works()
        for cut in [cuts[w.trajectory_id]]
    ]
    rest = run(make_exact_engine(model, **options(7, 33)), resumed)
    for key, (tokens, logprobs, finish) in whole.items():
        assert rest[key] == (tokens[cuts[key] :], logprobs[cuts[key] :], finish)
