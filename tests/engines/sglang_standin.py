"""A process that speaks as SGLang does (`sglang_wire`), and computes: the torch engine samples, and the plain
Hugging Face model answers for prompts. No SGLang has any part in this.

    python tests/engines/sglang_standin.py MODEL PORT SLOTS SEQUENCE
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from http_double import Part, serving
from millrace.core.completion.columns import token_array
from millrace.core.errors import WeightsError
from millrace.core.types import Finish, Sampling, Work
from millrace.engines.own.load_engine import load_engine
from sglang_wire import SglangHandler, settings

PATIENCE_S = 60.0
IDLE_S = 0.2
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class Computing:
    """See `sglang_wire.Served`. One thread computes, in `run`; the threads of requests ask it."""

    def __init__(self, model: str, slots: int, sequence: int) -> None:
        self.label, self.paused = "default", False
        self.settings = settings(
            max_req_input_len=sequence, max_total_num_tokens=slots * sequence, decodes=slots
        )
        self._engine = load_engine(model, slots=slots, max_sequence_tokens=sequence)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.vocab = self._model.config.vocab_size
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._streams: dict[int, SimpleQueue[Part]] = {}  # by trajectory
        self._leases, self._versions = count(), count(1)

    # ------------------------------------------------------------ on the thread that computes

    def run(self) -> None:
        while True:
            working = self._engine.has_work and not self.paused
            try:
                call, answered = self._asked.get(timeout=0.0 if working else IDLE_S)
                try:
                    answered.set_result(call())
                except Exception as error:
                    answered.set_exception(error)
            except Empty:
                if working:
                    self._step()
            for part in self._engine.take_progress():
                tokens = list(zip(part.columns.tokens.tolist(), part.columns.logprobs, strict=True))
                self._say(part.trajectory_id, tokens, part.finish and REASONS[part.finish])

    def _step(self) -> None:
        """Weights that give no numbers give tokens all the same, as in SGLang."""
        try:
            self._engine.step()
        except WeightsError:
            for key in list(self._streams):
                self._engine.release([key])
                self._say(key, [(0, math.nan)], None)

    def _say(self, key: int, tokens: list[tuple[int, float]], reason: str | None) -> None:
        if key in self._streams:
            self._streams[key].put((tokens, reason))
        if reason is not None:
            self._streams.pop(key, None)

    def _begin(self, key: int, prompt: Sequence[int], sampling: Sampling) -> SimpleQueue[Part]:
        """A seed names the noise, as SGLang's does: an earlier request with it has ended."""
        self._say(key, [], "abort")
        self._streams[key] = stream = SimpleQueue()
        work = Work(
            key,
            group_id=key,
            lease=next(self._leases),
            prompt=token_array(prompt),
            tokens=token_array(()),
            sampling=sampling,
            seed=0,
        )
        self._engine.submit([work])
        return stream

    def _end(self, key: int, stream: SimpleQueue[Part]) -> None:
        if self._streams.get(key) is stream:
            del self._streams[key]
            self._engine.release([key])

    def _abort_all(self) -> None:
        self.paused = True
        for part in self._engine.release(list(self._streams)):
            self._say(part.trajectory_id, [], "abort")

    def _load(self, directory: str) -> None:
        self._engine.load_standby(directory)
        self._engine.swap(next(self._versions))
        state = load_file(Path(directory) / "model.safetensors")
        self._model.load_state_dict(state, strict=not self._model.config.tie_word_embeddings)

    @torch.no_grad()
    def _logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._model(torch.tensor([tokens])).logits[0]

    # ------------------------------------------------------------ from the threads of requests

    def _ask(self, call: Callable[[], Any]) -> Any:
        answered: Future[Any] = Future()
        self._asked.put((call, answered))
        return answered.result(timeout=PATIENCE_S)

    def sample(self, given: dict[str, Any]) -> Iterator[Part]:
        params, tokens = given["sampling_params"], given["input_ids"]
        sampling = Sampling(
            max_tokens=params["max_new_tokens"],
            temperature=params["temperature"],
            stop_token_ids=() if params["ignore_eos"] else tuple(params["stop_token_ids"]),
            ignore_eos=params["ignore_eos"],
        )
        key = params["sampling_seed"]
        stream = self._ask(lambda: self._begin(key, tokens, sampling))
        try:
            reason = None
            while reason is None:
                sampled, reason = stream.get(timeout=PATIENCE_S)
                yield sampled, reason
        finally:
            self._ask(lambda: self._end(key, stream))

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        rows = self._ask(lambda: self._logits(tokens)).log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def top_logprob(self, given: dict[str, Any]) -> float:
        params = given["sampling_params"]
        ((token, bias),) = params["logit_bias"].items()
        logits = self._ask(lambda: self._logits(given["input_ids"]))[-1].clone()
        logits[int(token)] += bias
        return float((logits / params["temperature"]).log_softmax(-1).max())

    def load(self, directory: str) -> str:
        try:
            self._ask(lambda: self._load(directory))
        except Exception as error:
            return f"Failed to update weights: {error}."
        return ""

    def pause(self) -> None:
        self._ask(self._abort_all)

    def resume(self) -> None:
        self.paused = False

    def check_idle(self) -> bool:
        return True  # a pause leaves nothing


if __name__ == "__main__":
    model, port, slots, sequence = sys.argv[1:]
    computing = Computing(model, int(slots), int(sequence))
    with serving(SglangHandler, int(port), served=computing):
        computing.run()
