"""vLLM's part of `engines.py`, for a Python that has vLLM and need not have Millrace.

    python -P vllm_arrivals.py JOB

JOB is a JSON file. The last line of the output is {"tokens_per_s": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

KV_BYTES_ON_CPU = 1 << 28


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"})
    if job["cpu"]:
        in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
        os.environ.update(in_process | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    from vllm import EngineArgs, LLMEngine

    llm = LLMEngine.from_engine_args(EngineArgs(**arguments(job)))
    rates = [drive(llm, job, index) for index in range(job["rounds"])]
    print(json.dumps({"tokens_per_s": rates[-1]}), flush=True)
    os._exit(0)  # its processes end with their parent


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    if job["cpu"]:
        memory: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES_ON_CPU}
    else:
        memory = {"gpu_memory_utilization": 0.85}
    return {
        "model": job["model"],
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": job["dtype"],
        "max_model_len": job["max_model_len"],
        "max_num_seqs": job["slots"],
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **memory,
        **job["settings"],
    }


def drive(llm: Any, job: dict[str, Any], index: int) -> float:
    """Tokens a second, with the log-prob of each, as a trainer needs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    waiting = iter(enumerate(job["requests"]))

    def add() -> None:
        if (request := next(waiting, None)) is not None:
            number, (prompt, new_tokens) = request
            params = SamplingParams(
                max_tokens=new_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm.add_request(f"{index}.{number}", {"prompt_token_ids": prompt}, params)

    began, tokens = time.perf_counter(), 0
    for _ in range(job["slots"]):
        add()
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
                add()
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
