"""Rows of a batch on several threads, with the gradients of one thread, bit for bit.

Each thread computes a row alone, with its forward and its backward pass, and then takes the next row. Rows
add to the gradient of a parameter in their order. A row that comes too early waits for the rows before it.
Rows begin in their order, so the first of the rows at work never waits.

The gradient of an output projection is as large as the vocabulary. autograd would keep a copy of it for each
row until the embedding that it is tied to has one too. So the output projection adds to the sum itself, and
embeddings add after all rows.
"""

from __future__ import annotations

import sys
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
from millrace.placement.memory.activation_memory import spares
from millrace.placement.thread_plan import divided, row_full, row_tokens

R = TypeVar("R")
T = TypeVar("T")


IN_TURN = "in_turn"  # attribute of a parameter
APART_MIN = 10**8
"""Tokens times parameters. The calls of one more row of a small model take as long as the backward pass of
these tokens."""


class _AtWork(threading.local):
    turns: RowTurns | None = None
    row = 0


_at_work = _AtWork()


class _Abandoned(Exception):
    """Another row failed."""


@dataclass(frozen=True, slots=True)
class RowThreads:
    """Rows of at most `tokens` tokens, `count` rows at a time, each on `each` threads of torch. `full`: see
    `pack`. `in_turn`: output projection and embedding add to sums themselves. `apart`: so many tokens without
    an advantage have rows of their own."""

    tokens: int
    count: int = 1
    each: int = 1
    full: int | None = None
    in_turn: bool = False
    apart: int = 0

    def run(self, work: Callable[[R], T], rows: Sequence[R], parameters: Sequence[torch.Tensor]) -> list[T]:
        """`work(row)` of every row. It adds to the gradients of `parameters`, and changes nothing else that
        rows share.

        Raises: what `work` raises for the first row that fails.
        """
        turns, count = RowTurns(len(rows), in_turn=self.in_turn), min(self.count, len(rows))
        if count < 2:
            results = [turns.take(index, work, row) for index, row in enumerate(rows)]
            turns.finish()
            return results
        with (
            turns.of(parameters),
            ThreadPoolExecutor(count, "row", torch.set_num_threads, (self.each,)) as pool,
        ):
            futures = [pool.submit(turns.take, index, work, row) for index, row in enumerate(rows)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _Abandoned):
                raise error
        turns.finish()
        return [future.result() for future in futures]


def turns_of(weight: torch.Tensor) -> RowTurns | None:
    """Those of the row that this thread computes, if gradients of `weight` may be added in their turn
    (`lookup.install`)."""
    return _at_work.turns if hasattr(weight, IN_TURN) and weight.grad is not None else None


def row_threads(
    model: PreTrainedModel,
    token_budget: int,
    *,
    alone: bool = True,
    several: bool = True,
    narrow: bool = False,
) -> RowThreads:
    """Of a trainer. `alone`: it is one process. `several`: rows can be computed at the same time. `narrow`:
    see `row_full`.

    On a CPU torch computes with `each` threads from then on.
    """
    if model.device.type != "cpu" or not alone:
        return RowThreads(token_budget, apart=0 if alone else sys.maxsize)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = row_tokens(parameters, token_budget)
    full = row_full(parameters, token_budget, narrow=narrow)
    count, each = divided(threads_of_process(), cut=several and tokens < token_budget)
    torch.set_num_threads(each)
    # In a smaller model a gradient of the vocabulary is small, and bits stay those of an offloaded trainer.
    return RowThreads(tokens, count, each, full, in_turn=spares(parameters), apart=APART_MIN // parameters)


class RowTurns:
    """Which rows have added to which parameters."""

    def __init__(self, num_rows: int, *, in_turn: bool) -> None:
        self._news = threading.Condition()
        self._added: dict[int, set[int]] = {
            row: set() for row in range(num_rows)
        }  # of rows at work, or to come
        self._later: dict[int, list[Callable[[], object]]] = {row: [] for row in range(num_rows)}
        self._failed, self._in_turn = False, in_turn

    @contextmanager
    def of(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, a backward pass waits for its turn at each of `parameters`."""
        hooks = [
            hook
            for parameter in parameters
            for hook in (
                parameter.register_hook(partial(self._wait, id(parameter))),
                parameter.register_post_accumulate_grad_hook(partial(self._note, id(parameter))),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self, index: int, work: Callable[[R], T], row: R) -> T:
        _at_work.turns, _at_work.row = self if self._in_turn else None, index
        try:
            if self._failed:
                raise _Abandoned
            return work(row)
        except BaseException:
            self._failed = True
            raise
        finally:
            _at_work.turns = None
            with self._news:
                del self._added[index]
                self._news.notify_all()

    @contextmanager
    def sum_of(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """The gradient of `parameter`, for this row to add to, as soon as the rows before have added."""
        assert parameter.grad is not None
        self._wait(id(parameter))
        yield parameter.grad
        self._note(id(parameter))

    def later(self, add: Callable[[], object]) -> None:
        """Call `add` after all rows, in the order of the rows."""
        self._later[_at_work.row].append(add)

    def finish(self) -> None:
        for add in (add for row in sorted(self._later) for add in self._later[row]):
            add()

    def _wait(self, parameter: int, gradient: torch.Tensor | None = None) -> None:
        with self._news:
            self._news.wait_for(lambda: self._failed or self._is_next(parameter))
        if self._failed:
            raise _Abandoned

    def _is_next(self, parameter: int) -> bool:
        return all(parameter in added for row, added in self._added.items() if row < _at_work.row)

    def _note(self, parameter: int, tensor: torch.Tensor | None = None) -> None:
        with self._news:
            self._added[_at_work.row].add(parameter)
            self._news.notify_all()
