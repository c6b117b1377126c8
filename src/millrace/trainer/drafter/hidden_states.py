"""Hidden states of some rows of a batch, kept from the passes that train the policy.

Shape suffixes: T = tokens of a row, N = trained tokens, H = hidden size.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from millrace.devices.gpu import on
from millrace.trainer.batch.packing import Row

TOKENS_MIN = 4096
"""Rows are kept until they have so many trained tokens, of each row the first so many at most."""


@dataclass(frozen=True, slots=True)
class Passage:
    """The final hidden state before each of some tokens, behind the last norm. Nothing has a gradient.

    goes_on_N  the token is the one that the next state stands on
    """

    states_NH: torch.Tensor
    tokens_N: torch.Tensor
    goes_on_N: torch.Tensor

    @classmethod
    def joined(cls, passages: list[Self]) -> Self:
        columns = zip(*((p.states_NH, p.tokens_N, p.goes_on_N) for p in passages), strict=True)
        return cls(*(torch.cat(column) for column in columns))


class HiddenStates:
    """Keeps passages of the rows whose digests are least. So the choice depends neither on threads nor on the
    number of optimizer steps. `model`: its base model gets a hook, which changes nothing."""

    def __init__(self, model: Any) -> None:
        self._own, self._lock = threading.local(), threading.Lock()
        self._kept: list[tuple[bytes, int, Passage]] = []
        model.base_model.register_forward_hook(self._note)

    def forget(self) -> None:
        self._kept.clear()

    def take(self) -> Passage | None:
        """The passages since `forget`. None: there was no row."""
        kept, self._kept = self._kept, []
        return Passage.joined([passage for _, _, passage in kept]) if kept else None

    @contextmanager
    def of(self, row: Row) -> Iterator[None]:
        """Inside the block, this thread computes the final states of `row`."""
        self._own.row = row
        try:
            yield
        finally:
            self._own.row = None

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        row: Row | None = getattr(self._own, "row", None)
        if row is None:
            return
        key = xxh3_128_digest(row.tokens_T.tobytes() + row.sources_N.tobytes())
        with self._lock:
            if not self._wanted(key):
                return
        passage = _passage(row, output.last_hidden_state[0].detach())
        with self._lock:
            if self._wanted(key):
                insort(self._kept, (key, len(passage.tokens_N), passage), key=lambda kept: kept[0])
            while sum(tokens for _, tokens, _ in self._kept[:-1]) >= TOKENS_MIN:
                self._kept.pop()

    def _wanted(self, key: bytes) -> bool:
        """A second pass of a row is not."""
        if any(key == other for other, _, _ in self._kept):
            return False
        return sum(tokens for other, tokens, _ in self._kept if other < key) < TOKENS_MIN


def _passage(row: Row, hidden_TH: torch.Tensor) -> Passage:
    device, sources_N, targets_N = hidden_TH.device, row.sources_N[:TOKENS_MIN], row.targets_N[:TOKENS_MIN]
    goes_on_N = on(device, _goes_on(row, sources_N, targets_N))
    return Passage(hidden_TH[on(device, sources_N)].float(), on(device, targets_N), goes_on_N)


def _goes_on(row: Row, sources_N: NDArray[Any], targets_N: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the next source holds the target: they are neighbours in one sequence."""
    goes_on_N, places_N = np.zeros(len(sources_N), np.bool_), row.positions_T[sources_N]
    goes_on_N[:-1] = (row.tokens_T[sources_N[1:]] == targets_N[:-1]) & (places_N[1:] == places_N[:-1] + 1)
    return goes_on_N
