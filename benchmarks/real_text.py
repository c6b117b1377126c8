"""Exactness on a model that somebody else trained: its texts, its log-probs and its gradients.

    python benchmarks/real_text.py --model DIRECTORY [--completions 10000] [--compared 128] [--json]

`make real` makes such a DIRECTORY. Prompts are those of the three tasks of examples/real, and open questions.
All is float32. Completions are sampled by the own engine, one half at a temperature of 1, one half at 0.7.

retokenised_share  of completions, those with other ids when they are decoded and encoded again. With it come
                   the reasons, and a table of the ids that change
*_transformers     `greedy_equal`: of greedy completions, those that transformers would write too.
                   `greedy_first_gap`: where one first differs, the gap of the two largest logits; the most.
                   `logprob_gap`: |engine - transformers| of sampled tokens, in nats
*_vllm             the same of vLLM's build for CPUs; log-probs of completions at a temperature of 1
gradient_*         JAX's trainer and torch's on one batch. `difference`: the norm of the difference over that
                   of torch's gradient, of all and of the tensor that differs most. `norm_difference`: of the
                   norms, as each trainer computes its own, and in float64

vLLM and JAX are those of `make setup-vllm` and `make setup-jax`, or of `--vllm` and `--jax`. What has no such
Python is left out.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, parser_of, report, require, run_logged, say, sized, table
from text_parts.compared import Transformers, gap_figures, greedy_figures
from text_parts.completions import SAMPLES, Asked, Completion, greedy, prompts, sampled
from text_parts.retokenised import Retokenised

from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.turns.end_ids import end_ids

PARTS = Path(__file__).parent / "text_parts"
PAIRS = 10
GROUPS, GROUP = 2, 4
"""Of the batch whose gradients are compared."""


def retokenised_part(found: Retokenised) -> dict[str, Any]:
    table(found.by_task(), first="task")
    print("\n" + "\n".join(found.table(PAIRS)) + "\n")
    return found.shares() | {"pairs": [[*pair, count] for pair, count in found.pairs.most_common(PAIRS)]}


def asked_elsewhere(python: Path, script: str, job: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    """What a script says of `job` with another Python. None: there is no such Python."""
    if not python.exists():
        say(f"left out, there is no {python}: {script}")
        return None
    path, log = directory / f"{script}.json", directory / f"{script}.log"
    path.write_text(json.dumps(job))
    run_logged([python, "-P", PARTS / script, path], log, threads=None)
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found


def vllm_part(
    found: dict[str, Any], reference: Transformers, each: Sequence[Completion], at_one: Sequence[Completion]
) -> dict[str, float]:
    """`each`: greedy completions. `at_one`: completions at a temperature of 1."""
    differences = []
    for number, (ours, theirs) in enumerate(zip(each, found["greedy"], strict=True)):
        if ours.tokens != theirs:
            pairs = zip(ours.tokens, theirs, strict=False)
            same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(theirs))
            differences.append(reference.difference(number, ours, same))
    ours_N = np.concatenate([np.array(one.logprobs) for one in at_one])
    gaps = np.abs(ours_N - np.concatenate([np.array(one) for one in found["logprobs"]]))
    return greedy_figures(differences, len(each), "vllm") | gap_figures(gaps, "logprob_gap_vllm")


def batch_job(model: Path, completions: Sequence[Completion]) -> dict[str, Any]:
    """Groups of completions of one prompt each, with rewards 0 and 1 in turns."""
    groups = []
    for begin in range(0, GROUPS * SAMPLES, SAMPLES):
        group = [one for one in completions[begin : begin + SAMPLES] if one.temperature == 1][:GROUP]
        rewarded = [[one.tokens, one.logprobs, float(n % 2)] for n, one in enumerate(group)]
        groups.append([group[0].asked.tokens, rewarded])
    return {"model": str(model.resolve()), "groups": groups}


def vllm_job(
    model: Path, ends: set[int], each: Sequence[Completion], at_one: Sequence[Completion]
) -> dict[str, Any]:
    return {
        "model": str(model.resolve()),
        "room": 1 + max(len(one.asked.tokens) + one.asked.max_tokens for one in (*each, *at_one)),
        "greedy": [[one.asked.tokens, one.asked.max_tokens] for one in each],
        "sampled": [[one.asked.tokens, one.tokens] for one in at_one],
        "ends": sorted(ends),
    }


def measure(options: Any, tokenizer: Any, asked: Sequence[Asked], directory: Path) -> dict[str, Any]:
    model, ends = options.model, end_ids(str(options.model), tokenizer)
    began_s = time.perf_counter()
    completions = sampled(model, asked, options.completions)
    tokens = sum(len(one.tokens) for one in completions)
    say(f"{len(completions)} completions of {tokens} tokens in {time.perf_counter() - began_s:.0f} s")
    result: dict[str, Any] = {"completions": len(completions), "tokens": tokens}
    result |= retokenised_part(Retokenised(tokenizer, ends, completions))
    each, compared = greedy(model, asked[: options.greedy]), completions[: options.compared]
    at_one = [one for one in compared if one.temperature == 1]
    gc.collect()  # the engine's memory
    reference = Transformers(model)
    differences = reference.first_differences(each)
    result |= greedy_figures(differences, len(each), "transformers")
    result |= gap_figures(reference.logprob_gaps(compared), "logprob_gap_transformers")
    say("compared with transformers")
    job = vllm_job(model, ends, each, at_one)
    if found := asked_elsewhere(options.vllm, "vllm_logprobs.py", job, directory):
        result |= vllm_part(found, reference, each, at_one)
    if found := asked_elsewhere(options.jax, "gradients.py", batch_job(model, completions), directory):
        result |= found
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a model's directory")
    parser.add_argument("--completions", type=int, default=sized(10_000, 16))
    parser.add_argument("--compared", type=int, default=sized(128, 8), help="of them, those to compare")
    parser.add_argument("--greedy", type=int, default=sized(64, 4), help="greedy completions to compare")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="a Python with it")
    parser.add_argument("--jax", type=Path, default=ROOT / ".venv-jax/bin/python", help="a Python with it")
    options = parser.parse_args()
    require(options.model, "--model DIRECTORY, the directory of a model")
    tokenizer = load_tokenizer(options.model)
    asked = prompts(options.model, tokenizer, max(-(-options.completions // SAMPLES), options.greedy))
    with tempfile.TemporaryDirectory() as name:
        result = measure(options, tokenizer, asked, Path(name))
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
