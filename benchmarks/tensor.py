"""vLLM with a whole model, beside vLLM with its model divided among two processes; rounds interleaved.

    python benchmarks/tensor.py [--model 128x4] [--requests 8] [--rounds 3] [--json]

Requests, loads and pauses are those of
`engines.py`. CPU seconds and memory are those of the engine and of all its processes. On a CPU the division
saves nothing; the figures say what a rank costs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from common import (
    ENVIRONMENT,
    NO_VLLM,
    ROOT,
    VLLM_PYTHON,
    median,
    parser_of,
    report,
    require,
    say,
    sized,
    table,
)
from engine_process import IN_FLIGHT, Fed, Requests

from engines import Published, prepare
from millrace.core.types import Endpoint
from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import EngineOptions
from millrace.runtime.vitals import VitalSigns
from millrace.weights.ring import open_reader

DEGREES = (1, 2)
LOADS = sized(5, 1)
MB = 1e6


class Divided(Fed):
    def __init__(self, degree: int, directory: str, requests: Requests, endpoint: Endpoint) -> None:
        slots = max(len(requests), IN_FLIGHT)
        options = EngineOptions(
            model_path=directory, device="cpu", tensor=degree, slots=slots, max_sequence_tokens=1088
        )
        self.engine, self._reader = open_engine("vllm", options), open_reader(endpoint)
        self._requests = requests


def measured(action: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds, CPU seconds of this process and those below, and the bytes that they grew by."""
    signs, started = VitalSigns(), time.perf_counter()
    before = signs.take([], receiving=False)
    action()
    after = signs.take([], receiving=False)
    return (
        time.perf_counter() - started,
        after.cpu_s - before.cpu_s,
        after.resident_bytes - before.resident_bytes,
    )


def compare(directory: str, rounds: int) -> dict[int, dict[str, float]]:
    """By degree, the medians."""
    requests = [tuple(one) for one in json.loads((Path(directory) / "given.json").read_text())["requests"]]
    published, engines = Published(directory), dict[int, Divided]()
    version = published.publish()
    told: dict[int, list[dict[str, float]]] = {degree: [] for degree in DEGREES}
    for degree in DEGREES:

        def start(degree: int = degree) -> None:
            engines[degree] = Divided(degree, directory, requests, published.endpoint)
            engines[degree].ready(version)

        seconds, cpu_s, size = measured(start)
        told[degree].append({"start s": seconds, "start CPU s": cpu_s, "MB": size / MB})
        say(f"{degree} is ready")
    for index in range(rounds + 1):
        for degree, engine in engines.items():
            tokens = 0

            def one_round(engine: Divided = engine, lease: int = index) -> None:
                nonlocal tokens
                tokens = engine.round(lease)

            seconds, cpu_s, _ = measured(one_round)
            told[degree] += [{"tok/s": tokens / seconds, "tok/CPU s": tokens / cpu_s}] if index else []
        say(f"round {index} of {rounds}")
    for _ in range(LOADS):
        version = published.publish()
        for degree, engine in engines.items():
            told[degree].append(engine.pause(version))
    for engine in engines.values():
        engine.engine.close()  # what vLLM prints then comes before the figures
    names = dict.fromkeys(name for answer in told[1] for name in answer)
    return {
        degree: {name: median([one[name] for one in answers if name in one]) for name in names}
        for degree, answers in told.items()
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=sized("128x4", "128x2"), help="hidden size x layers")
    parser.add_argument("--requests", type=int, default=sized(8, 2))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--python", default=VLLM_PYTHON, help="an interpreter with vLLM")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        require(Path(options.python).exists(), NO_VLLM.format(options.python))
        os.execve(
            options.python, [options.python, *sys.argv], ENVIRONMENT | {"PYTHONPATH": str(ROOT / "src")}
        )
    with tempfile.TemporaryDirectory() as directory:
        parameters = prepare(directory, options.model, options.requests)
        rows = compare(directory, options.rounds)
    table({f"{degree} process{'es' * (degree > 1)}": row for degree, row in rows.items()})
    report({"parameters": parameters, "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
