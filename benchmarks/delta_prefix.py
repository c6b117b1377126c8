"""Deltas against zstandard with the older version as its prefix (`zstd --patch-from`): size and speed.

    python benchmarks/delta_prefix.py [--steps 60] [--rounds 3] [--megabytes 64] [--json]

The pairs of versions are of two sorts, all in bfloat16:

trained   versions `--steps` - 1 and `--steps` of the model of benchmarks/delta.py
normal    `--megabytes` of weights with the deviation 0.02, whose float32 masters a normal update moves, of
          about the learning rate

own       millrace.weights.delta, in chunks of 1 MiB
level N   zstandard with the same chunk of the older version as a raw-content dictionary, at this level
whole     the same at level 3, with the whole older version as the dictionary and a window over both versions

density   share of the elements whose bits changed
smaller   bytes of a version over those of its delta
encode    raw Gbit over CPU seconds of one thread, the median of `--rounds`
decode    the same, to apply the delta
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from common import median, parser_of, report, say, sized, table
from delta import CHUNK_BYTES, RATES, trained

from millrace.weights.delta.coding import apply, encode

LEVELS = sized((1, 3, 9), (3,))
DEVIATION, UPDATE = 0.02, 0.5

Encode = Callable[[np.ndarray, np.ndarray], bytes]
Decode = Callable[[bytes, np.ndarray, np.ndarray], None]


def normal(lr: float, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """(older, newer): both in bfloat16, as bytes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(num_bytes // 2, generator=generator) * DEVIATION
    update = torch.randn(num_bytes // 2, generator=generator) * (UPDATE * lr)
    older, newer = (weights.bfloat16().view(torch.uint8).numpy() for weights in (masters, masters + update))
    return older, newer


def prefixed(level: int, chunk_bytes: int) -> tuple[Encode, Decode]:
    """zstandard's settings for a dictionary of this length, with a window over dictionary and chunk."""
    window_log = (2 * chunk_bytes - 1).bit_length()
    table_log = min(window_log - 1, 24)
    settings = zstandard.ZstdCompressionParameters.from_level(
        level,
        window_log=window_log,
        hash_log=table_log,
        chain_log=table_log,
        enable_ldm=chunk_bytes > CHUNK_BYTES,
    )

    def prefix(older: np.ndarray) -> zstandard.ZstdCompressionDict:
        return zstandard.ZstdCompressionDict(older.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)

    def compress(newer: np.ndarray, older: np.ndarray) -> bytes:
        compressor = zstandard.ZstdCompressor(compression_params=settings, dict_data=prefix(older))
        return compressor.compress(newer)

    def decompress(delta: bytes, older: np.ndarray, into: np.ndarray) -> None:
        opener = zstandard.ZstdDecompressor(dict_data=prefix(older), max_window_size=1 << window_log)
        into[:] = np.frombuffer(opener.decompress(delta, max_output_size=len(into)), np.uint8)

    return compress, decompress


def own() -> tuple[Encode, Decode]:
    return lambda newer, older: encode(newer, older, 2), apply


def timed(
    coder: tuple[Encode, Decode], chunk_bytes: int, older: np.ndarray, newer: np.ndarray, rounds: int
) -> dict[str, float]:
    """Raises AssertionError: a delta did not lead to its version."""
    compress, decompress = coder
    cuts = [slice(at, at + chunk_bytes) for at in range(0, len(newer), chunk_bytes)]
    into, encode_s, decode_s = np.zeros_like(newer), [], []
    for _ in range(rounds):
        began = time.thread_time()
        deltas = [compress(newer[cut], older[cut]) for cut in cuts]
        encode_s.append(time.thread_time() - began)
        into[:] = 0
        began = time.thread_time()
        for cut, delta in zip(cuts, deltas, strict=True):
            decompress(delta, older[cut], into[cut])
        decode_s.append(time.thread_time() - began)
        assert np.array_equal(into, newer), "a delta did not lead to its version"
    gbit = newer.nbytes * 8e-9
    return {
        "density": float((older.view(np.uint16) != newer.view(np.uint16)).mean()),
        "smaller": newer.nbytes / sum(map(len, deltas)),
        "encode": gbit / median(encode_s),
        "decode": gbit / median(decode_s),
    }


def compared(name: str, older: np.ndarray, newer: np.ndarray, rounds: int) -> dict[str, dict[str, float]]:
    rows = {f"{name}, own": timed(own(), CHUNK_BYTES, older, newer, rounds)}
    for level in LEVELS:
        rows[f"{name}, level {level}"] = timed(
            prefixed(level, CHUNK_BYTES), CHUNK_BYTES, older, newer, rounds
        )
    rows[f"{name}, whole"] = timed(prefixed(3, len(newer)), len(newer), older, newer, rounds)
    for row, figures in rows.items():
        say(f"{row}: smaller {figures['smaller']:.1f}, encode {figures['encode']:.2f} Gbit/s")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=sized(60, 2))
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument(
        "--megabytes", type=int, default=sized(64, 1), help="MiB of the weights that are normal"
    )
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for lr in RATES:
        older, newer = normal(lr, options.megabytes << 20)
        rows |= compared(f"normal {lr:g}", older, newer, options.rounds)
    for lr in RATES:
        published, _, _ = trained(lr, options.steps, 1)
        older, newer = (weights.view(np.uint8) for weights in published[-2:])
        rows |= compared(f"trained {lr:g}", older, newer, options.rounds)
    table(rows, first="pair")
    report({"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
