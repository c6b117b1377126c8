"""What it costs to digest a trainer's weights once more before an update: CPU time over that of the step.

    python benchmarks/recheck.py            models of 3 and 34 million parameters, in two number formats
    python benchmarks/recheck.py --quick    one step of the smaller model

A step is of a batch of about 2,000 tokens. The share falls with the tokens of a batch, not with the model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from common import parser_of, report, sized  # one thread, before torch

sys.path += [str(Path(__file__).resolve().parents[1] / "tests" / "unit")]

from trainer_doubles import make_batch, tiny_model

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.trainer.model import named_weights
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.trainer import PolicyTrainer, StepSettings

FULL = ["full_attention"]
SIZES = {
    "3M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "layer_types": 4 * FULL},
    "34M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "layer_types": 8 * FULL},
}


def measure(size: str, dtype: torch.dtype, groups: int, rounds: int) -> tuple[int, float, float]:
    """Tokens of a batch, CPU seconds of a step, and of the digest of all weights."""
    torch.set_num_threads(1)
    settings = StepSettings(Optimizer(), 4096, 32, 1.0, torch.float32, published=dtype)
    trainer = PolicyTrainer(tiny_model(**SIZES[size]), build(PolicyGradient()), settings)
    buffers = PublishBuffers(named_weights(trainer.model), dtype)
    steps, digests = [], []
    with tempfile.TemporaryDirectory() as place:
        for version in range(rounds + 1):
            batch = make_batch(version, groups=groups, group_size=8)
            began = time.process_time()
            trainer.step(batch, quarantine=Path(place))
            stepped = time.process_time()
            buffers.digest()
            steps.append(stepped - began)
            digests.append(time.process_time() - stepped)
    tokens = sum(len(s.columns) + len(g.prompt) for g in batch.groups for s in g.sequences)
    return tokens, median(steps[1:]), median(digests[1:])


def main() -> None:
    options, shares = parser_of(__doc__).parse_args(), {}
    for size in sized(list(SIZES), ["3M"]):
        for dtype in torch.float32, torch.bfloat16:
            tokens, step_s, digest_s = measure(size, dtype, sized(16, 2), sized(5, 1))
            name = f"{size} {str(dtype)[6:]}"
            shares[f"{name}, digest over step"] = digest_s / step_s
            print(
                f"{name:12} {tokens:6,} tokens: step {step_s:.3f} s, digest {1e3 * digest_s:.2f} ms",
                flush=True,
            )
    report(shares, as_json=options.json)


if __name__ == "__main__":
    main()
