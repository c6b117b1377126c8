"""Generate completions without a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millrace.core.completion.columns import token_array
from millrace.core.types import Finish, Sampling, Work
from millrace.rollout.protocol import Engine

# Every call numbers its trajectories from 0. A newer lease distinguishes them from those of earlier calls.
_leases = itertools.count()


class Completion(NamedTuple):
    """Token ids, and the reason why generation ended."""

    tokens: list[int]
    finish: Finish


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    n: int = 1,
    seed: int = 0,
    on_end: Callable[[], None] = lambda: None,
) -> list[list[Completion]]:
    """`n` completions of every prompt, in the order of the prompts.

    The engine must serve a version and be otherwise idle. Completion j of prompt i depends on the
    weights, the prompt, `sampling`, `seed` and (i, j) only. `on_end` is called at the end of each completion.
    """
    assert engine.version >= 0 and not engine.has_work, engine.load()
    lease = next(_leases)
    works = [
        Work(
            trajectory_id=index * n + attempt,
            group_id=index,
            lease=lease,
            prompt=token_array(prompt),
            tokens=token_array(),
            sampling=sampling,
            seed=seed,
        )
        for index, prompt in enumerate(prompts)
        for attempt in range(n)
    ]
    tokens: list[list[int]] = [[] for _ in works]
    ends: dict[int, Finish] = {}
    engine.submit(works)
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            tokens[progress.trajectory_id].extend(progress.columns.tokens)
            if progress.finish is not None:
                ends[progress.trajectory_id] = progress.finish
                on_end()
    completions = [Completion(each, ends[index]) for index, each in enumerate(tokens)]
    return [completions[start : start + n] for start in range(0, len(works), n)]
