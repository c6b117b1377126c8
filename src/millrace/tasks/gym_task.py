"""Rows of reasoning-gym, made when they are needed."""

from __future__ import annotations

import difflib
import hashlib
import io
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from millrace.config.tables.task import GymTaskSection
from millrace.core.errors import ConfigError, DataError
from millrace.core.extras import refuse_missing
from millrace.tasks.chat import More, Tools, render
from millrace.tasks.row_lines import Row

CACHED_ROWS = 1024
_GENERATOR = np.random.MT19937(0)
_LIBRARY, LIBRARY_S = threading.Lock(), 0.5
"""Rows are made in one thread and scored in another. A scorer that never ends must not stop the rows too."""


class GymTask:
    """A reasoning-gym data set. Each row is generated when it is needed.

    reasoning-gym seeds row i with `seed + i`, so neighbouring seeds share nearly all rows. So the golden
    ratio spreads seeds over 31 bits: small `data_seed`s are hundreds of thousands of rows apart, and a
    held-out set with another seed has other rows.
    """

    prompt, answer = "question", "answer"

    def __init__(self, config: GymTaskSection, tokenizer: Any) -> None:
        self.rows = config.size
        self._config, self._tokenizer = config, tokenizer
        seed = config.data_seed * 2_654_435_769 % 2**31
        self.dataset = _gym_dataset(config.name, config.size, seed, config.options)
        self._cached = lru_cache(CACHED_ROWS)(self._generate)

    def row_id(self, row: int) -> str:
        return f"{self._config.name}/{self._config.data_seed}:{row}"

    def columns(self, row: int) -> Row:
        return self._cached(row)

    def prompt_text(self, row: int, more: More = "", tools: Tools = ()) -> str:
        columns = self.columns(row)
        question = columns["question"]
        return render(self._config, self._tokenizer, columns, question, self.row_id(row), more, tools)

    def is_chat(self, row: int) -> bool:
        return self._config.chat

    def _generate(self, row: int) -> Row:
        try:
            with isolated(self.row_id(row)):
                return self.dataset[row]
        except Exception as error:
            raise DataError(f"{self.row_id(row)}: not generated: {type(error).__name__}: {error}") from error


@contextmanager
def isolated(seed: str) -> Iterator[None]:
    """Code of the library: it draws from generators that `seed` alone decides, leaves those of `random` and
    numpy as they were, and prints nothing. Some families draw from them, some seed them anew, some print."""
    is_alone = _LIBRARY.acquire(timeout=LIBRARY_S)
    before = random.getstate(), get_bit_generator()
    set_bit_generator(_GENERATOR)  # a copy of its state and back would take 60 us
    random.seed(seed)
    np.random.seed(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little"))
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(before[0])
        set_bit_generator(before[1])
        if is_alone:
            _LIBRARY.release()


def _gym_dataset(name: str, size: int, seed: int, options: dict[str, Any]) -> Any:
    refuse_missing("reasoning_gym", '`task.kind` ("gym")')
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4) or sorted(DATASETS)[:3]
        raise ConfigError(
            f"`task.name` ({name!r}) is not a reasoning-gym data set. Nearest: {', '.join(near)} "
            f"({len(DATASETS)} in all)"
        )
    try:
        with isolated(name):
            return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        fields = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"size", "seed"})
        raise ConfigError(
            f"`task.options` {options} do not fit reasoning-gym's `{name}` ({error}); "
            f"it knows {', '.join(fields)}"
        ) from error
