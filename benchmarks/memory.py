"""Peak memory of trainer and engine against what they cannot do without; log-probs of a large vocabulary.

    python benchmarks/memory.py [--rounds 3] [--json]

Each figure is the growth of a fresh process's peak resident memory beyond what it had after its imports.
The minimum counts one copy of what has to be there: float32 weights and both moments of Adam for the
trainer, weights and the slots' keys and values for the engine. On top of it and reported: a gradient as
large as the weights, and the standby weights that let the engine decode while it pulls. What is left are
activations, which `batch.token_budget` bounds (512 here) and `model.recompute` makes small: the trainer is
measured with it, and as `trainer_kept` without. `step_s` says what recomputing costs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import ENVIRONMENT, median, parser_of, report, say, sized, table

VOCAB, HIDDEN, LAYERS = sized((8192, 512, 8), (512, 64, 2))
SLOTS, SEQUENCE = sized((32, 1024), (4, 64))
COMPLETION, GROUP, GROUPS = 192, 4, 4
TOKEN_BUDGET = 512
LARGE_VOCAB, LARGE_TOKENS = sized((151_936, 1024), (4096, 64))


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def peak_growth(action: Callable[[], object]) -> int:
    """How far the peak rises above what is resident now while `action` runs; its result stays alive."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    kept = action()
    peak = resident("VmHWM")
    del kept
    return peak - before


def make_model(directory: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def trainer(directory: str, *, recompute: bool = True) -> dict[str, float]:
    """Three optimizer steps on 16 sequences, as the trainer's worker makes them."""
    import torch

    from millrace.algorithms import build
    from millrace.config.tables.algorithms import PolicyGradient
    from millrace.config.tables.training import Optimizer
    from millrace.core.completion.columns import TokenColumns
    from millrace.core.types import Batch, TrainGroup, TrainSequence
    from millrace.trainer.batch.batch_step import StepSettings
    from millrace.trainer.model import load_model, named_weights, recompute_layers
    from millrace.trainer.publish.publisher import PublishBuffers
    from millrace.trainer.trainer import PolicyTrainer

    def batch(version: int) -> Batch:
        def sequence(index: int) -> TrainSequence:
            tokens = [(7 * index + i) % VOCAB for i in range(COMPLETION)]
            columns = TokenColumns.of(tokens, [-1.0] * COMPLETION, version)
            return TrainSequence(index, columns, index % 2, truncated=False)

        groups = range(GROUPS)
        return Batch(
            version,
            [TrainGroup(g, [1] * 64, [sequence(g * GROUP + i) for i in range(GROUP)]) for g in groups],
        )

    def run() -> object:
        model = load_model(directory, torch.device("cpu"))
        if recompute:
            recompute_layers(model)
        settings = StepSettings(
            Optimizer(lr=1e-5), TOKEN_BUDGET, COMPLETION, 1.0, torch.float32, torch.float32
        )
        policy = PolicyTrainer(model, build(PolicyGradient()), settings)
        buffers = PublishBuffers(named_weights(model), torch.float32)
        for version in range(3):
            step_s.append(policy.step(batch(version), rejected_dir=Path(directory)).step_s)
            buffers.fill()
        sizes["weights"] = sum(p.numel() * 4 for p in model.parameters())
        return policy, buffers

    sizes: dict[str, int] = {}
    step_s: list[float] = []
    peak, weights = peak_growth(run), sizes["weights"]
    return {"peak": peak, "minimum": 3 * weights, "gradient": weights, "step_s": min(step_s)}


def trainer_kept(directory: str) -> dict[str, float]:
    return trainer(directory, recompute=False)


def engine(directory: str) -> dict[str, int]:
    """As in a replica: every slot filled to its last position, new weights pulled on the way."""
    from millrace.core.types import Sampling, Work
    from millrace.engines.own.load_engine import open_engine
    from millrace.engines.own.torch_engine import TorchEngine
    from millrace.rollout.protocol import EngineOptions

    def pull(made: TorchEngine, version: int) -> None:
        for buffer in made.standby_buffers():
            buffer.data[:] = 0
        made.swap(version)

    def run() -> object:
        options = EngineOptions(
            model_path=directory,
            device="cpu",
            slots=SLOTS,
            max_sequence_tokens=SEQUENCE,
            keep_kv=False,
            probe=False,
        )
        made = open_engine(options)
        pull(made, 0)
        prompt = [3] * (SEQUENCE - 8)
        made.submit(Work(i, 0, 0, prompt, [], Sampling(max_tokens=8), seed=0) for i in range(SLOTS))
        made.step()
        pull(made, 1)
        while made.has_work:
            made.step()
        sizes["weights"] = sum(buffer.data.nbytes for buffer in made.buffers())
        return made

    sizes: dict[str, int] = {}
    peak = peak_growth(run)
    kv_bytes = 2 * LAYERS * SLOTS * 4 * SEQUENCE * 64 * 4
    return {"peak": peak, "minimum": sizes["weights"] + kv_bytes, "standby": sizes["weights"]}


def logprobs(_: str, *, full: bool = False) -> dict[str, int]:
    """Forward and backward of the sampled tokens' log-probs at a large vocabulary."""
    import torch

    from millrace.trainer.row_logprobs import token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(LARGE_TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(LARGE_VOCAB, HIDDEN) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(LARGE_VOCAB, (LARGE_TOKENS,))

    def run() -> object:
        if full:
            out = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        else:
            out, _ = token_logprobs(hidden, weight, targets, temperature=1.0)
        out.sum().backward()
        return out

    return {"peak": peak_growth(run), "minimum": weight.nbytes + hidden.nbytes}  # their gradients


def full_logits(directory: str) -> dict[str, int]:
    return logprobs(directory, full=True)


PARTS = {
    "trainer": trainer,
    "trainer_kept": trainer_kept,
    "engine": engine,
    "logprobs": logprobs,
    "full_logits": full_logits,
}


def measured(part: str, directory: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", part, "--model", directory]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def imports() -> None:
    """Load and set up what is needed once, before memory is counted."""
    for module in (
        "transformers.models.qwen3.modeling_qwen3",
        "millrace.engines.own.load_engine",
        "millrace.trainer.role",
    ):
        importlib.import_module(module)
    torch = importlib.import_module("torch")
    x = torch.randn(64, 64, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x @ x, x, x).sum().backward()
    torch.optim.AdamW([x], fused=True).step()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=sized(3, 1))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        imports()
        print(json.dumps(PARTS[options.part](options.model)))
        return
    rounds: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
    with tempfile.TemporaryDirectory() as directory:
        make_model(directory)
        for index in range(options.rounds):
            say(f"round {index + 1} of {options.rounds}")
            for part in PARTS:
                rounds[part].append(measured(part, directory))
    rows = {
        part: {
            "peak_mb": (peak := median([one["peak"] for one in found])) / 1e6,
            "minimum_mb": (least := found[0]["minimum"]) / 1e6,
            "over_minimum": peak / least,
            "gradient_or_standby_mb": (found[0].get("gradient", 0) + found[0].get("standby", 0)) / 1e6,
            "step_s": median([one["step_s"] for one in found]) if "step_s" in found[0] else None,
        }
        for part, found in rounds.items()
    }
    table(rows)
    roles = [rows["trainer"], rows["engine"]]
    report(
        {
            "peak_over_minimum": sum(r["peak_mb"] for r in roles) / sum(r["minimum_mb"] for r in roles),
            "trainer_peak_over_minimum": rows["trainer"]["over_minimum"],
            "engine_peak_over_minimum": rows["engine"]["over_minimum"],
            "full_logits_over_logprobs": rows["full_logits"]["peak_mb"] / rows["logprobs"]["peak_mb"],
            "rows": rows,
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
