"""The training of the drafter: a fixed number of updates for each batch, between two steps.

The updates need what a step leaves and nothing else changes until the next: hidden states of the batch, the
embedding and the output projection. So a repeated step gives the same head, whatever the time it took.

Shape suffixes: N = tokens of the passage, B = positions of an update, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from millrace.config.schema import Config
from millrace.core.types import Batch, StepResult
from millrace.devices.draft_head import DraftHead, first_head
from millrace.devices.gpu import on
from millrace.trainer.adapted_linear import published_weights
from millrace.trainer.batch.packing import Row
from millrace.trainer.trainer import PolicyTrainer

UPDATES = 8  # of a batch
DEPTH = 3  # tokens in a row that are guessed from guesses
POSITIONS_MAX, LOGITS_MAX = 256, 1 << 24  # of an update
GRAD_NORM_MAX = 1.0


class DrafterTraining:
    """A head, its optimizer, and the copy of the head that is published.

    The teacher is the policy: its distribution at the next positions of the batch, at the temperature that it
    samples with. The loss is the cross-entropy with it. Nothing here has a gradient but the head.

    The updates for a batch begin when its step ends, in a thread of their own: the trainer's idle time. The
    next step waits for their end. The head before them is what is published with the step's version, so
    publishing waits for nothing.
    """

    def __init__(self, model: Any, *, temperature: float, seed: int) -> None:
        self._model, self._temperature, self._seed = model, temperature, seed
        self.states = HiddenStates(model)
        weight = model.get_output_embeddings().weight
        head = first_head(weight.shape[-1], seed, weight.device)
        self._parameters = {name: torch.nn.Parameter(tensor) for name, tensor in head.tensors.items()}
        self.head = DraftHead.of(self._parameters)
        self.published = {name: tensor.clone() for name, tensor in head.tensors.items()}
        lr = min(2e-3, 0.5 / weight.shape[-1])
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=lr, weight_decay=0.0)
        self._positions = max(16, min(POSITIONS_MAX, LOGITS_MAX // weight.shape[0]))
        threads = torch.get_num_threads()  # of the policy: another number would become that of new threads
        self._thread = ThreadPoolExecutor(1, "drafter", torch.set_num_threads, (threads,))
        self._updates: Future[None] | None = None

    # ------------------------------------------------------------ around a step

    def finish(self) -> None:
        """Wait for the updates that were begun. Raises what stopped them."""
        if self._updates is not None:
            self._updates.result()

    def begin(self, version: int) -> None:
        """The step to `version` ended: publish the head as it is with it, and begin the updates for its
        batch. A batch without a trained token changes nothing."""
        if (passage := self.states.take()) is None:
            return
        for name, tensor in self.published.items():
            tensor.copy_(self._parameters[name].detach())
        self._updates = self._thread.submit(self._update_all, passage, version)

    def _update_all(self, passage: Passage, version: int) -> None:
        starts_N = torch.nonzero(passage.goes_on_N)[:, 0]
        if not len(starts_N):
            return
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + version) % 2**63)
        for _ in range(UPDATES):
            drawn_B = torch.randint(len(starts_N), (self._positions,), generator=generator)
            self._update(passage, starts_N[drawn_B.to(starts_N.device)])

    def _update(self, passage: Passage, starts_B: torch.Tensor) -> None:
        """One update. Degenerate: a loss that is not finite -> none."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss(passage, starts_B)
        if not loss.isfinite():
            return
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), GRAD_NORM_MAX)
        self._optimizer.step()

    def loss(self, passage: Passage, starts_B: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the guesses from `starts_B`, each up to `DEPTH` tokens deep."""
        embedding = self._model.get_input_embeddings().weight.detach()
        states_BH, place_B = passage.states_NH[starts_B], starts_B
        valid_B = torch.ones_like(starts_B, dtype=torch.bool)
        total, count = states_BH.new_zeros(()), 0.0
        for _ in range(DEPTH):
            valid_B = valid_B & passage.goes_on_N[place_B]
            states_BH = self.head(states_BH, embedding[passage.tokens_N[place_B]].to(states_BH.dtype))
            place_B = (place_B + 1).clamp(max=len(passage.tokens_N) - 1)
            with torch.no_grad():
                teacher_BV = self._logits(passage.states_NH[place_B]).softmax(-1)
            entropy_B = -(teacher_BV * self._logits(states_BH).log_softmax(-1)).sum(-1)
            total = total + torch.where(valid_B, entropy_B, 0.0).sum()
            count += valid_B.sum().item()
        return total / max(count, 1.0)

    def _logits(self, states_BH: torch.Tensor) -> torch.Tensor:
        """(B, V) as the policy samples with them."""
        of_model = self._model.config
        logits = F.linear(states_BH, self._model.get_output_embeddings().weight.detach().to(states_BH.dtype))
        if (cap := getattr(of_model, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits / (self._temperature * getattr(of_model, "logits_scaling", 1.0))

    # ------------------------------------------------------------ a checkpoint

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all that a checkpoint needs, as `{state}/drafter.{name}`. Waits for the updates."""
        self.finish()
        tensors = {f"published/{name}": tensor.clone() for name, tensor in self.published.items()}
        for name, parameter in self._parameters.items():
            states = {"value": parameter.detach()} | self._optimizer.state[parameter]
            tensors |= {f"{key}/{name}": state.clone() for key, state in states.items()}
        return tensors

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore the tensors of `tensors`. Empty: the checkpoint has no drafter, so it begins anew."""
        self._optimizer.state.clear()
        for key_and_name, tensor in saved.items():
            key, name = key_and_name.split("/", 1)
            parameter = self._parameters[name]
            if key in ("value", "published"):
                (parameter.data if key == "value" else self.published[name]).copy_(tensor)
            else:
                where = "cpu" if key == "step" else parameter.device
                self._optimizer.state[parameter][key] = tensor.clone().to(where)


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
    def of(self, row: Row | None) -> Iterator[None]:
        """Inside the block, this thread computes the final states of `row`; None: they are not kept."""
        before, self._own.row = getattr(self._own, "row", None), row
        try:
            yield
        finally:
            self._own.row = before

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


class DraftingTrainer(PolicyTrainer):
    """A `PolicyTrainer` whose batches also train a drafter. Its policy is that of a `PolicyTrainer`, bit for
    bit: the drafter reads detached states, and has an optimizer of its own. `drafter_seed`: of the first head
    and of the positions that are drawn. Other arguments: as of `PolicyTrainer`."""

    def __init__(self, drafter_seed: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        temperature = self.settings.temperature
        self.drafter = DrafterTraining(self.model, temperature=temperature, seed=drafter_seed)

    def step(self, batch: Batch, *, rejected_dir: Path) -> StepResult:
        """As `BatchStep.step`. The updates for the batch before have ended, and those for this batch begin
        afterwards."""
        self.drafter.finish()
        self.drafter.states.forget()
        result = super().step(batch, rejected_dir=rejected_dir)
        self.drafter.begin(self.version)
        return result

    def _forward(self, row: Row, *, reference: bool = False) -> tuple[torch.Tensor, ...]:
        with self.drafter.states.of(None) if reference else nullcontext():
            return super()._forward(row, reference=reference)

    def _backward(self, row: Row, *args: Any, **kwargs: Any) -> Any:
        """Rows without an advantage teach the drafter, too."""
        with self.drafter.states.of(row):
            return super()._backward(row, *args, **kwargs)


def policy_trainer(config: Config, *args: Any, **kwargs: Any) -> PolicyTrainer:
    """The trainer of a run of `config`, with a drafter if `rollout.drafts` says so. Other arguments: as of
    `PolicyTrainer`."""
    if config.rollout.drafts == "trained":
        return DraftingTrainer(config.seed, *args, **kwargs)
    return PolicyTrainer(*args, **kwargs)


def published_tensors(trainer: PolicyTrainer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a version: those of `published_weights`, and the drafter's."""
    weights = published_weights(trainer.model, dtype)
    return weights | trainer.drafter.published if isinstance(trainer, DraftingTrainer) else weights
