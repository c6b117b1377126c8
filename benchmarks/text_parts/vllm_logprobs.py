"""vLLM's part of `real_text.py`, for a Python that has vLLM and need not have Millrace.

    python -P vllm_logprobs.py JOB

JOB is a JSON file: `model`, `greedy` as [prompt, most tokens], `sampled` as [prompt, completion], `ends`. The
last line of the output is {"greedy": tokens of each, "logprobs": of each sampled token, at temperature 1}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

KV_BYTES = 1 << 29


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"})
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    os.environ.update(in_process | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    from vllm import LLM

    llm = LLM(
        job["model"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_model_len=job["room"],
        max_num_seqs=32,
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        disable_log_stats=True,
    )
    found = {"greedy": greedy(llm, job), "logprobs": logprobs(llm, job)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads end with this process


def greedy(llm: Any, job: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=job["ends"], detokenize=False)
        for _, max_tokens in job["greedy"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in job["greedy"]]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]


def logprobs(llm: Any, job: dict[str, Any]) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [*prompt, *tokens]} for prompt, tokens in job["sampled"]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        [at[token].logprob for at, token in zip(one.prompt_logprobs[len(prompt) :], tokens, strict=True)]
        for one, (prompt, tokens) in zip(outputs, job["sampled"], strict=True)
    ]


if __name__ == "__main__":
    main()
