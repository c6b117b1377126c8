"""How fast the digests of weights are: XXH3, and the sums that a GPU computes, in numpy and in torch.

    python benchmarks/digests.py [--megabytes 100] [--rounds 9] [--json]

Bytes a second of random bytes that are in memory already, the median of the rounds, which are interleaved.
numpy and XXH3 on one core; torch on the GPU, or where there is none on one core. `over_xxh3`: numpy's share.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from common import median, parser_of, report, sized, table

from millrace.core.digest import MULTILINEAR, XXH3, tensor_digest
from millrace.devices.device_digest import tensor_digests


def rate(num_bytes: int, action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return num_bytes / (time.perf_counter() - began)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=int, default=sized(100, 1))
    parser.add_argument("--rounds", type=int, default=sized(9, 1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = np.random.default_rng(0).integers(0, 256, options.megabytes * 10**6, dtype=np.uint8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = torch.from_numpy(data).to(device)
    kinds: dict[str, Callable[[], object]] = {
        "xxh3": lambda: tensor_digest(data, XXH3),
        "numpy": lambda: tensor_digest(data, MULTILINEAR),
        "torch": lambda: tensor_digests([there]),  # it ends with a read, so it is done
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds + 1):
        for name, action in kinds.items():
            taken[name].append(rate(len(data), action))
    rates = {f"{name}_bytes_per_s": median(each[1:]) for name, each in taken.items()}
    table({"GB/s": {name: value / 1e9 for name, value in rates.items()}})
    found = {**rates, "over_xxh3": rates["numpy_bytes_per_s"] / rates["xxh3_bytes_per_s"]}
    report({**found, "device": str(device)}, as_json=options.json)


if __name__ == "__main__":
    main()
