"""Every engine on the same weights and requests, each in a process of its own, rounds interleaved.

    python benchmarks/engines.py [--python .venv-vllm/bin/python] [--model 128x4] [--requests 32] [--json]

own, vllm       as a replica drives them: weights from a relay's ring, then steps until nothing is left
continuous      transformers' continuous batching, with a bounded cache
generate        transformers' `generate` on one padded batch; only tokens that were asked for count

Requests and their budgets are those of `engine.py`. `ready s`: from the start of the process until it can
generate. `tok/CPU s` counts the CPU seconds of the process: beside other programs it says more than `tok/s`.
`load ms`: how long an engine stands still for new weights with 16 requests in flight; vLLM proves them in
that time. `pause ms`: the same, until each of the 16 has its next token, keys and values computed again;
`pause CPU ms`: the CPU time of that.
`peak MB`: largest resident memory of the process, which shares the relay's.

`own_over_vllm` compares tokens for each CPU second, `vllm_load_pause_ms` is vLLM's `pause ms`, and
`vllm_conformance_passed` says whether `tests/engines --engine vllm` passes. Without an interpreter that has
vLLM (`make setup-vllm`) the three are none.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec
import torch
from common import ENVIRONMENT, ROOT, VLLM_PYTHON, median, parser_of, report, say, sized, table
from engine import make_model, make_requests
from transformers import AutoModelForCausalLM

from millrace.trainer.model import named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_writer

KINDS = ("own", "vllm", "continuous", "generate")
FED = {"own", "vllm"}
LOADS = sized(5, 1)
TIMEOUT_S = 1800.0
CONFORMANCE = {"all": "tests/engines", "part": "tests/engines/test_versions.py"}


class Published:
    """A relay's ring, into which the same weights are published again and again."""

    def __init__(self, directory: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory)
        self._buffers = PublishBuffers(named_weights(model), torch.float32)
        self._relay, self._next = RelayWorker("relay", slots=3), 0
        self.endpoint = asyncio.run(self._relay.open(self._buffers.weights_bytes))
        self._writer = open_writer(self.endpoint)

    def publish(self) -> int:
        version, self._next = self._next, self._next + 1
        asyncio.run(self._relay.stage(version, self._writer.write(version, self._buffers.fill())))
        return version


class Contestant:
    """A process of `engine_process.py`, by its questions and answers. What else it prints is in `log`."""

    def __init__(self, kind: str, python: str, directory: str, stack: ExitStack) -> None:
        self._kind, self._log = kind, Path(directory) / f"{kind}.log"
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks")]
        words = [python, "-c", f"from engine_process import serve; serve({kind!r}, {directory!r})"]
        self._process = stack.enter_context(
            subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(self._log.open("w")),
                env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        )
        stack.callback(self._process.kill)

    def ask(self, word: str, number: int) -> dict[str, float]:
        self._pipe(self._process.stdin).write(f"{word} {number}\n".encode())
        self._pipe(self._process.stdin).flush()
        answers = self._pipe(self._process.stdout)
        readable, _, _ = select.select([answers], [], [], TIMEOUT_S)
        line = answers.readline() if readable else b""
        if not line:
            told = self._log.read_text()[-3000:]
            raise SystemExit(
                f"{told}\n{self._kind} ended, or gave no answer to `{word}` in {TIMEOUT_S:.0f} s"
            )
        answer: dict[str, float] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def compare(kinds: dict[str, str], directory: str, rounds: int, loads: int) -> dict[str, dict[str, float]]:
    """By kind, what was measured. `kinds`: the interpreter of each."""
    given = json.loads((Path(directory) / "given.json").read_text())
    published = Published(directory)
    given["endpoint"] = msgspec.to_builtins(published.endpoint)
    (Path(directory) / "given.json").write_text(json.dumps(given))
    version = published.publish()
    told: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        for kind, python in kinds.items():
            started = time.perf_counter()
            contestants[kind] = Contestant(kind, python, directory, stack)
            answer = contestants[kind].ask("ready", version)
            told[kind].append({"ready s": time.perf_counter() - started, **answer})
            say(f"{kind} is ready")
        for index in range(rounds + 1):
            for kind, contestant in contestants.items():
                answer = contestant.ask("round", index)
                told[kind] += [answer] if index else []  # the first warms up
            say(f"round {index} of {rounds}")
        for _ in range(loads):
            version = published.publish()
            for kind in FED & kinds.keys():
                told[kind].append(contestants[kind].ask("pause", version))
    return {kind: summed_up(answers) for kind, answers in told.items()}


def summed_up(answers: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure over the answers that have it; of memory the last, which is the peak."""
    names = ("ready s", "tok/s", "tok/CPU s", "load ms", "pause ms", "pause CPU ms")
    had = {name: [answer[name] for answer in answers if name in answer] for name in names}
    return {name: median(values) for name, values in had.items() if values} | {
        "peak MB": answers[-1]["peak MB"]
    }


def figures(rows: dict[str, dict[str, float]], conformance: bool | None) -> dict[str, float | bool | None]:
    if "vllm" not in rows:
        return dict.fromkeys(("own_over_vllm", "vllm_load_pause_ms", "vllm_conformance_passed"))
    return {
        "own_over_vllm": rows["own"]["tok/CPU s"] / rows["vllm"]["tok/CPU s"],
        "vllm_load_pause_ms": rows["vllm"]["pause ms"],
        "vllm_conformance_passed": conformance,
    }


def conforms(python: str, part: str) -> bool:
    """Whether the tests pass; what failed is told on stderr."""
    words = [python, "-m", "pytest", "-n", "2", CONFORMANCE[part], "--engine", "vllm"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    say(done.stdout[-3000:])
    return done.returncode == 0


def prepare(directory: str, model: str, count: int) -> int:
    """A model and its requests; returns its number of parameters."""
    hidden, layers = map(int, model.split("x"))
    parameters = make_model(directory, hidden, layers)
    (Path(directory) / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    asked = [(request.prompt, request.new_tokens) for request in make_requests(count)]
    (Path(directory) / "given.json").write_text(json.dumps({"requests": asked}))
    return parameters


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=VLLM_PYTHON, help="an interpreter with vLLM")
    parser.add_argument("--model", default=sized("128x4", "128x2"), help="hidden size x layers")
    parser.add_argument("--requests", type=int, default=sized(32, 4))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument(
        "--conformance", choices=[*CONFORMANCE, "none"], default=sized("all", "none"), help="tests to run"
    )
    options = parser.parse_args()
    kinds = {kind: options.python if kind == "vllm" else sys.executable for kind in KINDS}
    if not Path(options.python).exists():
        say(f"{options.python} is not there: vLLM is left out")
        del kinds["vllm"]
    with tempfile.TemporaryDirectory() as directory:
        parameters = prepare(directory, options.model, options.requests)
        rows = compare(kinds, directory, options.rounds, LOADS)
    table(rows)
    asked = "vllm" in kinds and options.conformance != "none"
    passed = conforms(options.python, options.conformance) if asked else None
    told = {"conformance": CONFORMANCE[options.conformance]} if asked else {}
    report({"parameters": parameters, "rows": rows, **told, **figures(rows, passed)}, as_json=options.json)


if __name__ == "__main__":
    main()
