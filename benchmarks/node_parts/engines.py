"""The own engine against a tuned vLLM: requests of uneven lengths, and a new one whenever one ends."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import ENVIRONMENT, ROOT
from engine import Request, make_requests

from millrace.core.completion.columns import token_array
from millrace.core.types import Sampling, Work
from millrace.engines.own.load_engine import load_engine
from millrace.engines.own.torch_engine import TorchEngine
from node_parts.setting import Figures, Note, Setting

SCRIPT = Path(__file__).with_name("vllm_arrivals.py")
OWN_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TUNED: tuple[Figures, ...] = (
    {"max_num_batched_tokens": 8192},
    {"max_num_batched_tokens": 8192, "async_scheduling": True},
)
"""Settings of vLLM, each in a process of its own. The better rate counts."""
BEGIN_S_MAX = 120.0
"""After so many seconds no further setting is tried: the part has 4 minutes."""
ROUNDS = 2
"""The first one warms up, and records decode steps."""


def vllm_part(setting: Setting, note: Note) -> None:
    """`own_over_vllm`: tokens/s of the own engine with the settings of a run, over those of vLLM. As many
    requests as slots are there at once, and each later one comes when one ends. The ratio is there after the
    first setting of vLLM, in case of a deadline."""
    began_s, model, slots = time.monotonic(), setting.large(), setting.sized(64, 4)
    prompt, middle, longest = setting.sized((256, 256, 2048), (12, 16, 32))
    requests = make_requests(setting.sized(4, 2) * slots, prompt=prompt, middle=middle, longest=longest)
    own = own_rate(setting, model, requests, slots, prompt + longest + 1)
    note({"own_tokens_per_s": own, "requests": len(requests), "slots": slots})
    python, rates = python_with_vllm(), list[float]()
    if python is None:
        note({"skipped": f"vLLM is not installed, neither here nor in {OWN_PYTHON.relative_to(ROOT)}"})
        return
    for number, tuned in enumerate(TUNED):
        if rates and time.monotonic() - began_s > BEGIN_S_MAX:
            note({f"vllm-{number}": {"settings": tuned, "refused": "no time was left"}})
            continue
        job = {
            "model": str(model),
            "cpu": setting.device == "cpu",
            "dtype": setting.dtype,
            "slots": slots,
            "max_model_len": prompt + longest + 1,
            "rounds": ROUNDS,
            "requests": [[request.prompt, request.new_tokens] for request in requests],
            "settings": tuned,
        }
        outcome = vllm_rate(python, job, setting.scratch / f"vllm-{number}.json")
        note({f"vllm-{number}": {"settings": tuned, **outcome}})
        rates += [outcome["tokens_per_s"]] if "tokens_per_s" in outcome else []
        if rates:
            note({"vllm_tokens_per_s": max(rates), "own_over_vllm": own / max(rates)})
    if not rates:
        raise RuntimeError("vLLM ran with none of its settings")


def python_with_vllm() -> Path | None:
    """This interpreter, or the one of `scripts/setup-vllm`. None: neither has vLLM."""
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    return OWN_PYTHON if OWN_PYTHON.exists() else None


def vllm_rate(python: Path, job: Figures, path: Path) -> Figures:
    """`tokens_per_s`, or `refused`: the end of what vLLM printed. Not every release knows every setting."""
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [python, "-P", SCRIPT, path], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    if done.returncode != 0:
        return {"refused": done.stderr[-1000:]}
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def own_rate(
    setting: Setting, model: Path, requests: list[Request], slots: int, max_sequence_tokens: int
) -> float:
    engine = load_engine(
        str(model),
        device=setting.device,
        dtype=setting.dtype,
        slots=slots,
        max_sequence_tokens=max_sequence_tokens,
    )
    rates = [drive(engine, requests, slots, index) for index in range(ROUNDS)]
    engine.close()
    del engine
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()  # vLLM takes a share of the whole memory
    return rates[-1]


def drive(engine: TorchEngine, requests: list[Request], slots: int, round_index: int) -> float:
    """Tokens a second, from the first request to the end of the last."""
    works = iter([work_of(i, request, round_index) for i, request in enumerate(requests)])
    began, tokens, left = time.perf_counter(), 0, len(requests)
    engine.submit([next(works) for _ in range(slots)])
    while left:
        engine.step()
        for progress in engine.take_progress():
            tokens += len(progress.columns)
            if progress.finish is not None:
                left -= 1
                engine.submit([work for work in [next(works, None)] if work is not None])
    return tokens / (time.perf_counter() - began)


def work_of(index: int, request: Request, round_index: int) -> Work:
    sampling: Any = Sampling(max_tokens=request.new_tokens, ignore_eos=True)
    prompt = token_array(request.prompt)
    return Work(index, index, round_index, prompt, token_array(), sampling, seed=round_index)
