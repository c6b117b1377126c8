"""What a GPU is used for: the engine against its memory's speed, the trainer against its arithmetic.

    python benchmarks/gpu.py [--parts engine-0.6B trainer-0.6B weights ...] [--rehearse] [--json]

Models have the shape of Qwen3 0.6 B and 1.7 B and random weights in bfloat16. A part that fails leaves its
error in the result, and the others go on. After each figure the whole result so far is one line of JSON: who
ends this program at a deadline has what was measured until then. `--rehearse`: tiny sizes, on the CPU.

engine   steady decoding of N sequences of about 450 to 570 tokens. The roofline of a step is the time in
         which the memory copies the bytes that it must read: all weights, keys and values of all tokens.
         `over_roofline` is that time over the step's. `peer_tokens_per_s` is continuous batching of
         transformers with the same requests, `end_to_end_tokens_per_s` ours, both with their prompts.
trainer  steps on rows of 4,096 and 16,384 tokens, prompts shared by four. `mfu`: the arithmetic that the
         tokens need (recomputation not counted) over the peak of the GPU's data sheet, else of a product.
         `fp8`: the shorter rows with `trainer.quantization`
weights  what a publication stops the trainer for, what a pull takes (with `verify_s`, its digest) and a swap,
         and pinned copies of as much. `slots_pinned`: the writer's slot and the reader's
trl      trained tokens a second of the whole loop, and those of TRL's GRPOTrainer, if TRL is installed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ceilings import ceilings, fastest, seconds, settle
from common import cache_directory, parser_of, report, say
from loop_vs_trl import Bench, tokens_per_s
from peers.start import TASKS, make_untrained
from peers.trl.venv import present
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.digest import kind_of
from millrace.core.types import Batch, Sampling, TrainGroup, TrainSequence, Work
from millrace.devices.pinned import as_tensor
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.protocol import EngineOptions
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.batch.flat_batch import flatten
from millrace.trainer.batch.packing import pack
from millrace.trainer.model import install_kernels, named_weights, recompute_layers
from millrace.trainer.publish.publisher import buffers_of
from millrace.trainer.ranks.mesh import ALONE
from millrace.trainer.row_attention import NAME
from millrace.trainer.trainer import PolicyTrainer
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

PROMPT, NEW, CHUNK = 432, 144, 8192
WARM = 4

Figures = dict[str, Any]


class Sizes:
    """What is measured: in full on a GPU, and tiny in a rehearsal on the CPU."""

    def __init__(self, rehearse: bool) -> None:
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.counts = (1, 4) if rehearse else (1, 32, 128, 256)
        self.prompt, self.new = (12, 16) if rehearse else (PROMPT, NEW)
        self.peer_memory = 0.05 if rehearse else 0.5
        self.copied_bytes = 1 << 22 if rehearse else 1 << 31
        self.product = 256 if rehearse else 8192
        self.rows = {64: 2, 128: 1} if rehearse else {4096: 4, 16384: 2}
        self.rounds = 2 if rehearse else 5
        self.loop_steps = 3 if rehearse else 10
        self.loop_model = {"hidden": 64, "layers": 2} if rehearse else {"hidden": 1024, "layers": 28}
        self._tiny = rehearse

    def config(self, size: str) -> Qwen3Config:
        wide, layers = {"0.6B": 1024, "1.7B": 2048}[size], 28
        heads, kv_heads, vocab = 16, 8, 151_936
        if self._tiny:
            wide, layers, heads, kv_heads, vocab = wide // 16, 2, 4, 2, 5_000
        return Qwen3Config(
            vocab_size=vocab,
            hidden_size=wide,
            intermediate_size=wide * 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=32 if self._tiny else 128,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )


# ------------------------------------------------------------ the engine


def engine_part(sizes: Sizes, size: str, note: Callable[[Figures], None]) -> None:
    top = ceilings(sizes, note)
    config, rows = sizes.config(size), {}
    engine = random_engine(config, sizes, slots=max(sizes.counts))
    weights_bytes = sum(2 * p for p in tensor_sizes(engine))
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    note({"computes": engine.computes, "weights_bytes": weights_bytes, "kv_token_bytes": kv_bytes})
    for count in sizes.counts:
        row = decoding(engine, sizes, count)
        must_read = weights_bytes + kv_bytes * row["kv_tokens_mean"]
        row["over_roofline"] = must_read / top["copy_bytes_per_s"] / row["step_s"]
        rows[str(count)] = row
        note({"rows": rows})
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    note({"peer": guarded(lambda: peers(config, sizes, rows))})
    best = [row["over_roofline"] for count, row in rows.items() if int(count) >= 32]
    note({"over_roofline_min_from_32": min(best, default=None)})


def random_engine(config: Qwen3Config, sizes: Sizes, *, slots: int) -> TorchEngine:
    options = EngineOptions(
        model_path="",
        dtype="bfloat16",
        device=sizes.device.type,
        slots=slots,
        max_sequence_tokens=sizes.prompt + sizes.new + 64,
        prefill_chunk=CHUNK,
        keep_kv=False,
        probe=False,
    )
    engine = TorchEngine(architecture_of(config), options, eos_ids=(), decode=None)
    for buffer in engine.standby_buffers():
        values = torch.as_tensor(buffer.data).view(torch.bfloat16)
        if "norm" in buffer.name:
            values.fill_(1.0)
        else:  # one block of random numbers again and again: quick on a host
            block = torch.randn(1 << 16).mul_(0.02).bfloat16()
            values.copy_(block.repeat(-(-len(values) // len(block)))[: len(values)])
    engine.swap(0)
    return engine


def tensor_sizes(engine: TorchEngine) -> list[int]:
    return [len(buffer.data) // 2 for buffer in engine.standby_buffers()]


def works(sizes: Sizes, count: int, first_id: int, vocab: int) -> list[Work]:
    random = torch.Generator().manual_seed(first_id)
    prompts = torch.randint(vocab, (count, sizes.prompt), generator=random).tolist()
    sampling = Sampling(max_tokens=sizes.new, ignore_eos=True)
    return [
        Work(first_id + i, first_id + i, 0, token_array(prompt), token_array(), sampling, seed=1)
        for i, prompt in enumerate(prompts)
    ]


def decoding(engine: TorchEngine, sizes: Sizes, count: int) -> Figures:
    """Twice the same: the first warms up, and takes what is made once (CUDA graphs)."""
    steps = sizes.new - -(-count * sizes.prompt // CHUNK) - WARM - 2
    for attempt in range(2):
        done, began = engine.load().prefilled_tokens, time.perf_counter()
        engine.submit(works(sizes, count, attempt * count + 10_000 * count, 5_000))
        while engine.load().prefilled_tokens - done < count * (sizes.prompt - 1):
            engine.step()
        prefill_s = time.perf_counter() - began
        for _ in range(WARM):
            engine.step()
        kv_tokens = engine.load().kv_used_tokens
        settle(sizes.device)
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        step_s = (time.perf_counter() - started) / steps
        while engine.has_work:
            engine.step()
        engine.take_progress()
        whole_s = time.perf_counter() - began
    return {
        "step_s": step_s,
        "tokens_per_s": count / step_s,
        "prefill_tokens_per_s": count * sizes.prompt / prefill_s,
        "end_to_end_tokens_per_s": count * sizes.new / whole_s,
        "kv_tokens_mean": kv_tokens + count * steps / 2,
    }


def peers(config: Qwen3Config, sizes: Sizes, rows: dict[str, Figures]) -> str:
    """Into `rows`, tokens a second of transformers' continuous batching with its prompts: the better of 2."""
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=sizes.new, pad_token_id=0, eos_token_id=-1
    )
    memory = ContinuousBatchingConfig(max_memory_percent=sizes.peer_memory)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=memory) as manager:
        for count in sizes.counts:
            rates = [peer(manager, sizes, count, attempt) for attempt in range(2)]
            rows[str(count)]["peer_tokens_per_s"] = max(rates)
    return "measured"


def peer(manager: Any, sizes: Sizes, count: int, attempt: int) -> float:
    began, tokens, left = time.perf_counter(), 0, count
    for work in works(sizes, count, attempt, 5_000):
        manager.add_request(work.prompt.tolist(), max_new_tokens=sizes.new)
    while left:
        result = manager.get_result(timeout=30)
        assert result is not None, "continuous batching gave nothing for 30 s"
        if result.is_finished():
            tokens, left = tokens + len(result.generated_tokens), left - 1
    return tokens / (time.perf_counter() - began)


# ------------------------------------------------------------ the trainer


def trainer_part(sizes: Sizes, size: str, note: Callable[[Figures], None]) -> None:
    top, rows = ceilings(sizes, note), {}
    for row_tokens, num_rows in sizes.rows.items():
        # Activations of 16,384 tokens of the larger model do not fit 80 GB beside its states.
        recompute = size == "1.7B" and row_tokens > 4096
        rows[str(row_tokens)] = guarded(
            lambda tokens=row_tokens, rows=num_rows, again=recompute: training(
                sizes, size, tokens, rows, again, top
            )
        )
        note({"rows": rows})
    shorter = next(iter(sizes.rows.items()))
    rows["fp8"] = guarded(lambda: training(sizes, size, *shorter, False, top, quantised=True))
    note({"rows": rows})


def training(
    sizes: Sizes,
    size: str,
    row_tokens: int,
    num_rows: int,
    recompute: bool,
    top: Figures,
    *,
    quantised: bool = False,
) -> Figures:
    device, config = sizes.device, sizes.config(size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer = random_trainer(config, sizes, row_tokens, quantised=quantised)
    if recompute:
        recompute_layers(trainer.model)
    batch = make_batch(row_tokens, num_rows)
    with tempfile.TemporaryDirectory() as directory:

        def step() -> None:
            trainer.step(batch, rejected_dir=Path(directory))

        step_s = fastest(step, device, sizes.rounds)
    flops, tokens = flops_of(trainer, batch, row_tokens)
    peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "flops_per_s": flops / step_s,
        "mfu": flops / step_s / top["peak_flops"],
        "over_product": flops / step_s / top["product_flops"],
        "peak_bytes": peak_bytes,
        "recompute": recompute,
    }


def random_trainer(
    config: Qwen3Config, sizes: Sizes, row_tokens: int, *, quantised: bool = False
) -> PolicyTrainer:
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    install_kernels(model, sizes.device, ALONE, quantised=quantised)
    settings = StepSettings(
        optimizer=Optimizer(lr=1e-6),
        token_budget=row_tokens,
        max_tokens=row_tokens,
        temperature=1.0,
        dtype=torch.bfloat16,
        published=torch.bfloat16,
    )
    return PolicyTrainer(model, build(PolicyGradient()), settings)


def make_batch(row_tokens: int, num_rows: int) -> Batch:
    """Each row is one group: a prompt of a sixteenth of it, and four completions that share the rest."""
    random = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        found: list[int] = torch.randint(5_000, (count,), generator=random).tolist()
        return found

    def sequence(index: int, length: int) -> TrainSequence:
        columns = TokenColumns.of(tokens(length), [-8.0] * length, 0)
        return TrainSequence(
            trajectory_id=index,
            columns=columns,
            mask=[True] * length,
            reward=float(index % 2),
            truncated=False,
        )

    prompt = row_tokens // 16
    each = (row_tokens - prompt) // 4
    groups = [
        TrainGroup(row, tokens(prompt), [sequence(4 * row + i, each) for i in range(4)])
        for row in range(num_rows)
    ]
    return Batch(0, groups)


def flops_of(trainer: PolicyTrainer, batch: Batch, row_tokens: int) -> tuple[float, int]:
    """Forward and backward: 6 a parameter and its token, 12 a pair in attention and dimension. And the
    tokens that are forwarded."""
    config = trainer.model.config
    linear = [m for m in trainer.model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    rows = pack(flatten(batch, trainer.algorithm, max_tokens=row_tokens).minibatches[0], row_tokens)
    forwarded, trained = sum(len(row.tokens_T) for row in rows), sum(len(row.targets_N) for row in rows)
    pairs = sum(s.length * (len(s.prefix_P) + (s.length + 1) / 2) for row in rows for s in row.segments)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 12 * pairs * width * config.num_hidden_layers
    head = 6 * trained * config.vocab_size * config.hidden_size
    return 6 * forwarded * sum(m.weight.numel() for m in linear) + head + attention, forwarded


# ------------------------------------------------------------ weights


def weights_part(sizes: Sizes, note: Callable[[Figures], None]) -> None:
    top, config = ceilings(sizes, note), sizes.config("0.6B")
    torch.manual_seed(0)
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = buffers_of(named_weights(model), torch.bfloat16)
    engine = random_engine(config, sizes, slots=min(32, max(sizes.counts)))
    relay = RelayWorker("relay", slots=2)
    endpoint = asyncio.run(relay.open(buffers.weights_bytes))
    writer, reader = open_writer(endpoint), open_reader(endpoint)
    engine.submit(works(sizes, min(32, max(sizes.counts)), 0, 5_000))
    taken: list[Figures] = []
    for version in range(1, sizes.rounds + 2):
        for _ in range(3):
            engine.step()
        row: Figures = {}
        settle(sizes.device)
        began = time.perf_counter()
        filling = writer.begin(version, buffers.manifest)
        row["begin_s"] = time.perf_counter() - began
        buffers.copy(writer, filling)
        row["stall_s"] = time.perf_counter() - began
        digest = writer.end(filling, buffers.manifest, buffers.block_digests())
        row["digest_s"] = time.perf_counter() - began - row["stall_s"]
        began = time.perf_counter()
        asyncio.run(relay.stage(version, digest))
        row["stage_s"] = time.perf_counter() - began
        row["pull_s"] = seconds(lambda version=version: engine.stage(version, reader), sizes.device)
        row["verify_s"] = seconds(partial(engine.digest_standby, kind_of(digest)), sizes.device)
        row["swap_s"] = seconds(lambda version=version: engine.swap(version), sizes.device)
        row["first_step_s"] = seconds(engine.step, sizes.device)
        taken.append(row)
        medians = {name: statistics.median(one[name] for one in taken[1:] or taken) for name in row}
        count = buffers.weights_bytes
        note({
            **medians,
            "version_bytes": count,
            "slots_pinned": [as_tensor(end._memory.data[0]).is_pinned() for end in (writer, reader)],
            "stall_over_copy": medians["stall_s"] * top["to_host_bytes_per_s"] / count,
            "pull_over_copy": medians["pull_s"] * top["to_device_bytes_per_s"] / count,
            "digest_bytes_per_s": count / medians["digest_s"],
        })  # fmt: skip
    writer.close()
    reader.close()


# ------------------------------------------------------------ the whole loop


def trl_part(sizes: Sizes, note: Callable[[Figures], None]) -> None:
    """Trained tokens a second, ours and of TRL's GRPOTrainer: the same model of random weights, prompts,
    batch (8 x 8) and limits. Millrace holds trainer and replica on the one GPU."""
    python = present(cache_directory())
    if python is None:
        note({"skipped": "TRL is not installed"})
        return
    device, dtype = (sizes.device.type, "bfloat16" if sizes.device.type == "cuda" else "float32")
    found: Figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory, task = Path(scratch), TASKS["short"]
        start = make_untrained(task, directory / "start", **sizes.loop_model)
        bench = Bench(
            task, sizes.loop_steps, directory, start=start, python=python, device=device, dtype=dtype
        )
        for name in ("millrace", "trl_grpo"):
            try:
                found[f"{name}_tokens_per_s"] = tokens_per_s(bench.run(name, 0))
            except SystemExit as error:  # what it printed: the other is measured all the same
                found[name] = {"error": str(error)}
            note(found)
    if len(found) == 2 and "error" not in json.dumps(found):
        note({"over_trl": found["millrace_tokens_per_s"] / found["trl_grpo_tokens_per_s"]})


# ------------------------------------------------------------ all of it


def guarded(measure: Callable[[], Any]) -> Any:
    """What it gives, or its error in words: the next figure is measured all the same."""
    try:
        return measure()
    except Exception:
        return {"error": traceback.format_exc(limit=-6)}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Sizes, Callable[[Figures], None]], None]] = {
    "engine-0.6B": lambda sizes, note: engine_part(sizes, "0.6B", note),
    "engine-1.7B": lambda sizes, note: engine_part(sizes, "1.7B", note),
    "trainer-0.6B": lambda sizes, note: trainer_part(sizes, "0.6B", note),
    "trainer-1.7B": lambda sizes, note: trainer_part(sizes, "1.7B", note),
    "weights": weights_part,
    "trl": trl_part,
}


def measure(parts: Mapping[str, Callable[[Callable[[Figures], None]], None]], as_json: bool) -> Figures:
    """By part what was noted, and its error. `passed`: nowhere is one."""
    result: Figures = {"passed": True}
    for name, part in parts.items():
        figures: Figures = {}
        result[name] = figures

        def note(found: Figures, figures: Figures = figures) -> None:
            figures.update(found)
            if as_json:
                print(json.dumps(result), flush=True)

        failed = guarded(partial(part, note))
        figures.update(failed or {})
        result["passed"] = '"error"' not in json.dumps(result)
        say(f"{name}: {'failed' if failed else 'done'}")
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    options.rehearse = options.rehearse or options.quick
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: `--rehearse` runs on the CPU")
    sizes = Sizes(options.rehearse)
    result = measure({name: partial(PARTS[name], sizes) for name in options.parts}, options.json)
    report(result, as_json=options.json)
    raise SystemExit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
