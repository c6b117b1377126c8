"""Rows of a batch on several threads, with the gradients of one thread, bit for bit.

Each thread computes a row alone, with its forward and its backward pass, and then takes the next row. Rows
add to the gradient of a parameter in their order. A row that comes too early waits for the rows before it.
Rows begin in their order, so the first of the rows at work never waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from millrace.devices.threads import threads_of_process
from millrace.placement.threads import divided, row_tokens

R = TypeVar("R")
T = TypeVar("T")


class _Abandoned(Exception):
    """Another row failed."""


@dataclass(frozen=True, slots=True)
class RowThreads:
    """Rows of at most `tokens` tokens, `count` rows at a time, each on `each` threads of torch."""

    tokens: int
    count: int = 1
    each: int = 1

    def run(self, work: Callable[[R], T], rows: Sequence[R], parameters: Sequence[torch.Tensor]) -> list[T]:
        """`work(row)` of every row. It adds to the gradients of `parameters`, and changes nothing else that
        rows share.

        Raises: what `work` raises for the first row that fails.
        """
        if self.count == 1 or len(rows) < 2:
            return [work(row) for row in rows]
        turns, count = _Turns(len(rows)), min(self.count, len(rows))
        with (
            turns.of(parameters),
            ThreadPoolExecutor(count, "row", torch.set_num_threads, (self.each,)) as pool,
        ):
            futures = [pool.submit(turns.take, index, work, row) for index, row in enumerate(rows)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _Abandoned):
                raise error
        return [future.result() for future in futures]


def row_threads(
    model: PreTrainedModel, token_budget: int, *, alone: bool = True, several: bool = True
) -> RowThreads:
    """Of a trainer. `alone`: it is one process. `several`: rows can be computed at the same time.

    On a CPU torch computes with `each` threads from then on.
    """
    if model.device.type != "cpu" or not alone:
        return RowThreads(token_budget)
    tokens = row_tokens(sum(parameter.numel() for parameter in model.parameters()), token_budget)
    count, each = divided(threads_of_process(), cut=several and tokens < token_budget)
    torch.set_num_threads(each)
    return RowThreads(tokens, count, each)


class _Turns:
    """Which rows have added to which parameters."""

    def __init__(self, num_rows: int) -> None:
        self._news = threading.Condition()
        self._added: dict[int, set[int]] = {
            row: set() for row in range(num_rows)
        }  # of rows at work, or to come
        self._failed = False
        self._own = threading.local()

    @contextmanager
    def of(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, a backward pass waits for its turn at each of `parameters`."""
        hooks = [
            hook
            for index, parameter in enumerate(parameters)
            for hook in (
                parameter.register_hook(partial(self._wait, index)),
                parameter.register_post_accumulate_grad_hook(partial(self._note, index)),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, index: int, work: Callable[[R], T], row: R) -> T:
        self._own.row = index
        try:
            if self._failed:
                raise _Abandoned
            return work(row)
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._news:
                del self._added[index]
                self._news.notify_all()

    def _wait(self, parameter: int, gradient: torch.Tensor) -> None:
        with self._news:
            self._news.wait_for(lambda: self._failed or self._is_next(parameter))
        if self._failed:
            raise _Abandoned

    def _is_next(self, parameter: int) -> bool:
        return all(parameter in added for row, added in self._added.items() if row < self._own.row)

    def _note(self, parameter: int, tensor: torch.Tensor) -> None:
        with self._news:
            self._added[self._own.row].add(parameter)
            self._news.notify_all()
