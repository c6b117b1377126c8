"""Decode and training speed of this build, and of another one beside it, in turns on one GPU.

    python benchmarks/builds.py [--parts decode training] [--beside CHECKOUT] [--rehearse] [--json]

A model in the shape of Qwen3 0.6 B with random weights. Each build is a process of its own, which runs its
own `gpu.py`, and computes only when it is its turn. So both meet the same clocks and the same neighbours.
After each figure the whole result so far is one line of JSON.

decode    32 and 256 sequences: tokens/s, and the share of the memory's speed (`gpu.py` has the roofline)
training  rows of 4,096 and of 16,384 tokens: tokens/s, and the share of the GPU's arithmetic (`mfu`)

`over_beside_N` is the median, over rounds, of this build's tokens/s over the other's.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common import ENVIRONMENT, ROOT, median, medians, parser_of, report, say

Figures = dict[str, Any]
Note = Callable[[Figures], None]

ANSWER = "answer: "
ROUNDS, REHEARSED_ROUNDS = 3, 2
SIZES: dict[str, dict[str, tuple[int, int]]] = {
    "decode": {"32": (32, 2), "256": (256, 4)},
    "training": {"4096": (4096, 64), "16384": (16_384, 128)},
}
"""Sequences, or tokens of a row: in full, and in a rehearsal."""


class Build:
    """A process that measures one checkout."""

    def __init__(self, root: Path, *, rehearse: bool) -> None:
        path = os.pathsep.join([str(root / "src"), str(root / "benchmarks"), str(root), inherited()])
        self._rehearse = rehearse
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | {"PYTHONPATH": path},
        )

    def measure(self, part: str, size: int) -> Figures:
        """Raises: RuntimeError with the other process's words."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([part, size, self._rehearse]) + "\n")
        stdin.flush()
        answer = next((line for line in stdout if line.startswith(ANSWER)), None)
        if answer is None:
            raise RuntimeError(f"the process of a build ended: status {self._process.wait()}")
        figures: Figures = json.loads(answer.removeprefix(ANSWER))
        if "error" in figures:
            raise RuntimeError(figures["error"])
        return figures

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def inherited() -> str:
    """What PYTHONPATH has beside this checkout: packages that the machine lacks."""
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(word for word in words if word and not Path(word).is_relative_to(ROOT))


@contextmanager
def builds(roots: Sequence[Path], *, rehearse: bool) -> Iterator[list[Build]]:
    with ExitStack() as stack:
        found = []
        for root in roots:
            found.append(Build(root, rehearse=rehearse))
            stack.callback(found[-1].close)
        yield found


def compare(part: str, beside: Path | None, rehearse: bool, note: Note) -> None:
    """Each size in rounds, the builds in turns. The first round of a build warms up, and does not count."""
    roots = [ROOT, *([beside] if beside else [])]
    rows: Figures = {}
    with builds(roots, rehearse=rehearse) as found:
        for label, sizes in SIZES[part].items():
            taken: list[list[Figures]] = [[] for _ in found]
            for index in range((REHEARSED_ROUNDS if rehearse else ROUNDS) + 1):
                for build, figures in zip(found, taken, strict=True):
                    figures.append(build.measure(part, sizes[rehearse]))
                say(f"{part} {label}: round {index} of {REHEARSED_ROUNDS if rehearse else ROUNDS}")
            here, *others = [medians(figures[1:]) for figures in taken]
            rows[label] = {"size": sizes[rehearse], **here}
            for other in others:
                pairs = zip(*(figures[1:] for figures in taken), strict=True)
                ratio = median([ours["tokens_per_s"] / theirs["tokens_per_s"] for ours, theirs in pairs])
                rows[label] |= {"beside": other, "over_beside": ratio}
                note({f"over_beside_{label}": ratio})
            note({"rows": rows})


# ------------------------------------------------------------ in the process of a build


def side() -> None:
    """Answer commands until there are no more. What a size needs is kept until another size is asked for."""
    import gpu  # of this process's build

    top: Figures = {}
    kept: tuple[Any, Callable[[], Figures]] | None = None
    for line in sys.stdin:
        part, size, rehearse = json.loads(line)
        sizes = gpu.Sizes(rehearse)
        try:
            top = top or gpu.ceilings(sizes, lambda _: None)
            if kept is None or kept[0] != (part, size):
                kept = None
                gc.collect()
                if sizes.device.type == "cuda":
                    gpu.torch.cuda.empty_cache()
                kept = (part, size), {"decode": decoding, "training": training}[part](gpu, sizes, size, top)
            figures = kept[1]()
        except Exception:
            figures = {"error": traceback.format_exc(limit=-6)}
        print(f"{ANSWER}{json.dumps(figures)}", flush=True)


def decoding(gpu: Any, sizes: Any, count: int, top: Figures) -> Callable[[], Figures]:
    config = sizes.config("0.6B")
    engine = gpu.random_engine(config, sizes, slots=count)
    weights_bytes = 2 * sum(gpu.tensor_sizes(engine))
    kv_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim

    works, firsts = gpu.works, itertools.count(step=1_000_000)

    def measure() -> Figures:
        first = next(firsts)  # the engine answers a repeat of the same work without computing
        gpu.works = lambda sizes, count, first_id, vocab: works(sizes, count, first + first_id, vocab)
        row = gpu.decoding(engine, sizes, count)
        must_read = weights_bytes + kv_bytes * row["kv_tokens_mean"]
        row["over_roofline"] = must_read / top["copy_bytes_per_s"] / row["step_s"]
        return dict(row)

    return measure


def training(gpu: Any, sizes: Any, row_tokens: int, top: Figures) -> Callable[[], Figures]:
    trainer = gpu.random_trainer(sizes.config("0.6B"), sizes, row_tokens)
    batch = gpu.make_batch(row_tokens, sizes.rows[row_tokens])

    def measure() -> Figures:
        with tempfile.TemporaryDirectory() as directory:
            step = partial(trainer.step, batch, rejected_dir=Path(directory))
            step_s = gpu.fastest(step, sizes.device, sizes.rounds)
        flops, tokens = gpu.flops_of(trainer, batch, row_tokens)
        return {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "mfu": flops / step_s / top["peak_flops"],
        }

    return measure


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return side()
    from gpu import measure

    beside = options.beside and options.beside.resolve()
    if beside and not (beside / "benchmarks" / "gpu.py").exists():
        raise SystemExit(f"{beside} is no checkout of Millrace: it has no benchmarks/gpu.py")
    rehearse = options.rehearse or options.quick
    parts = {part: partial(compare, part, beside, rehearse) for part in options.parts}
    result = measure(parts, options.json)
    report(result, as_json=options.json)
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
