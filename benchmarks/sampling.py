"""What drawing a token costs the engine, by setting and size of the vocabulary.

    python benchmarks/sampling.py [--rounds 5] [--json]

Random logits of 32 rows, one thread, medians of rounds in milliseconds. `sorted`: only to sort the vocabulary
of each row, which finds the same cuts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common import medians, parser_of, report, sized, table

ROWS = sized(32, 4)
VOCABULARIES = sized((4_096, 151_936), (64,))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 20},
    "top-k, top-p": {"top_k": 20, "top_p": 0.95},
    "min-p": {"min_p": 0.1},
    "top-p": {"top_p": 0.95},
}


def milliseconds(compute: Callable[[], object]) -> float:
    began = time.perf_counter()
    compute()
    return 1e3 * (time.perf_counter() - began)


def times(vocabulary: int) -> dict[str, float]:
    """One round: of each setting what a draw takes, and what a sort would take beside it."""
    import torch

    from millrace.core.types import Sampling
    from millrace.engines.own.sampler import TokenSampler

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((ROWS, vocabulary), generator=generator)
    uniforms = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    found = {}
    for name, setting in SETTINGS.items():
        sampler = TokenSampler([Sampling(max_tokens=1, **setting)] * ROWS, logits.device)
        found[name] = milliseconds(partial(sampler, logits, uniforms))
    found["sorted"] = milliseconds(lambda: logits.sort(dim=-1, descending=True, stable=True))
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(5, 1))
    options = parser.parse_args()
    rows = {}
    for size in VOCABULARIES:
        times(size)  # what is made once
        rows[f"{size:,} tokens"] = medians([times(size) for _ in range(options.rounds)])
    table(rows, first="ms")
    largest = list(rows.values())[-1]
    report({"top_k_over_sorted": largest["top-k"] / largest["sorted"], "rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
