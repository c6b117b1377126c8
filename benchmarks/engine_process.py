"""One engine in a process of its own, which `engines.py` starts and asks.

A question is a line of standard input, `WORD NUMBER`; its answer is a line of JSON. The process ends with its
input. An engine that replicas use reads its weights from the relay's memory, as in a run. What comes from
transformers reads the model directory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

IN_FLIGHT, LONG = 16, 1000
FIRST_LONG = 1000  # leases of earlier rounds are smaller
STEPS_BETWEEN_LOADS = 5
Requests = list[tuple[list[int], int]]
"""Prompts and numbers of new tokens."""


class Fed:
    """An engine as a replica drives it."""

    def __init__(self, kind: str, directory: str, requests: Requests, endpoint: dict[str, Any]) -> None:
        from millrace.core.types import Endpoint
        from millrace.rollout.engine_kinds import open_engine
        from millrace.rollout.protocol import EngineOptions
        from millrace.weights.ring import open_reader

        slots = max(len(requests), IN_FLIGHT)
        options = EngineOptions(model_path=directory, device="cpu", slots=slots, max_sequence_tokens=1088)
        self.engine, self._reader = open_engine(kind, options), open_reader(Endpoint(**endpoint))
        self._requests = requests

    def ready(self, version: int) -> dict[str, float]:
        self.engine.stage(version, self._reader)
        self.engine.swap(version)
        return {}

    def round(self, lease: int) -> int:
        self._submit(self._requests, lease)
        tokens = 0
        while self.engine.has_work or self.engine.has_finished:
            self.engine.step()
            tokens += sum(len(part.columns) for part in self.engine.take_progress())
        return tokens

    def pause(self, version: int) -> dict[str, float]:
        """Of a load, until each of the trajectories in flight has its next token."""
        long = [(prompt, LONG) for prompt, _ in (self._requests * IN_FLIGHT)[:IN_FLIGHT]]
        self._submit(long, lease=FIRST_LONG + version)
        for _ in range(STEPS_BETWEEN_LOADS):
            self.engine.step()
        self.engine.take_progress()
        self.engine.stage(version, self._reader)
        cpu, started = time.process_time(), time.perf_counter()
        self.engine.swap(version)
        load_s = time.perf_counter() - started
        waiting = set(range(IN_FLIGHT))
        while waiting:
            assert self.engine.has_work, f"no next token of {sorted(waiting)}"
            self.engine.step()
            waiting -= {part.trajectory_id for part in self.engine.take_progress()}
        pause_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        self.engine.release(range(IN_FLIGHT))
        return {"load ms": 1000 * load_s, "pause ms": 1000 * pause_s, "pause CPU ms": 1000 * cpu_s}

    def _submit(self, requests: Requests, lease: int) -> None:
        from millrace.core.completion.columns import token_array
        from millrace.core.types import Sampling, Work

        self.engine.submit(
            Work(i, i, lease, token_array(prompt), token_array(), Sampling(max_tokens=count), seed=lease)
            for i, (prompt, count) in enumerate(requests)
        )


class Plain:
    """What transformers itself has: `generate`, or `continuous`."""

    def __init__(self, kind: str, directory: str, requests: Requests, stack: ExitStack) -> None:
        import engine  # beside this file
        from transformers import AutoModelForCausalLM

        self._requests = [engine.Request(prompt, count) for prompt, count in requests]
        self._run, self._by = engine.padded_generate, AutoModelForCausalLM.from_pretrained(directory).eval()
        if kind == "continuous":
            manager = engine.continuous_batching_manager(self._by, engine.LONGEST)
            self._run, self._by = engine.continuous_batching, stack.enter_context(manager)

    def ready(self, version: int) -> dict[str, float]:
        return {}

    def round(self, lease: int) -> int:
        tokens: int = self._run(self._by, self._requests)
        return tokens


def serve(kind: str, directory: str) -> None:
    """Answer questions until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    given = json.loads((Path(directory) / "given.json").read_text())
    with ExitStack() as stack:
        requests = [tuple(request) for request in given["requests"]]
        if kind in ("own", "vllm"):
            asked: Fed | Plain = Fed(kind, directory, requests, given["endpoint"])
        else:
            asked = Plain(kind, directory, requests, stack)
        for line in sys.stdin:
            word, number = line.split()
            answer = _round(asked, int(number)) if word == "round" else getattr(asked, word)(int(number))
            peak_MB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({**answer, "peak MB": peak_MB}), file=answers, flush=True)


def _round(asked: Fed | Plain, lease: int) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = asked.round(lease)
    return {"tok/s": tokens / (time.perf_counter() - wall), "tok/CPU s": tokens / (time.process_time() - cpu)}
