"""What a whole node does: gradients and speed of ranks, the way of a version, checkpoints, deaths, vLLM.

    python benchmarks/node.py [--parts gap fsdp ...] [--model PATH] [--gpus 8] [--rehearse] [--json]

The large model is `--model`, a Hugging Face directory, else random weights: in the shape of Qwen2.5 7B from
four GPUs on, of Qwen3 0.6B below. The small model always has that shape. A part that fails leaves its error
in the result, and the others go on. After each figure the whole result so far is one line of JSON.
`--rehearse`: tiny sizes, on the CPU, with gloo in place of NCCL.

gap      log-probs of the trainer against those that the engine sampled with: mean, p99.9, maximum, in nats
fsdp     the small model on four ranks against one process: loss, gradient, seconds, MFU
mfu      the large model on four ranks: MFU, against the peak of the GPU's data sheet
offload  memory of a trainer whose states lie on the host: while it loads, between steps, in a step
vllm     the own engine over vLLM, tokens/s: uneven lengths, and a request arrives whenever one ends
loop     a whole run: seconds from a step to its version being served, checkpoints, a resume on other ranks
faults   a whole run whose replica, rank and controller are killed: seconds until each is back, its accounts
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import parser_of, report, sized
from node_parts.engines import vllm_part
from node_parts.gap import gap_part
from node_parts.ranks import Job, fsdp_part, mfu_part, offload_part, one_rank
from node_parts.runs import faults_part, loop_part
from node_parts.setting import Note, Setting
from transformers.utils import logging as transformers_logging

from gpu import measure

REHEARSED_GPUS = 4
QUICK_PARTS = ["gap", "fsdp", "vllm", "loop"]
"""Those of `--quick`. The rest takes minutes, and `scripts/gpu-check --rehearse` runs it."""

PARTS: dict[str, Callable[[Setting, Note], None]] = {
    "gap": gap_part,
    "fsdp": fsdp_part,
    "mfu": mfu_part,
    "offload": offload_part,
    "vllm": vllm_part,
    "loop": loop_part,
    "faults": faults_part,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=sized(list(PARTS), QUICK_PARTS))
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: random weights)")
    parser.add_argument("--gpus", type=int, help="how many are used (default: all that torch sees)")
    parser.add_argument("--kept", type=Path, help="where random models are kept for another call")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.rank:
        config, directory, job = options.rank
        return one_rank(json.loads(config), Path(directory), Job(**json.loads(job)))
    rehearse = options.rehearse or options.quick
    if not rehearse and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: `--rehearse` runs on the CPU")
    gpus = options.gpus or (REHEARSED_GPUS if rehearse else torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="node-") as scratch:
        kept = options.kept or Path(scratch) / "models"
        setting = Setting(rehearse, gpus, kept.resolve(), Path(scratch), options.model)
        result = measure({name: partial(PARTS[name], setting) for name in options.parts}, options.json)
    report(result, as_json=options.json)
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
