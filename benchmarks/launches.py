"""What a layer launches on a GPU: counted on a CPU, on a device that computes nothing (torch's `meta`).

    python benchmarks/launches.py [--json]

Each operation that computes is a launch; views and new memory are none. A model with 2 layers and one with 4
are counted. Half of the difference is a layer's, so embedding and head do not count.

decode_launches_a_layer    a decode step of the own engine in bfloat16, of the dense model that needs most
decode                     of each model, how often a layer launches which operation
mixtures_launches_a_layer, mixtures  the same, of models with experts, on a GPU that groups their matmuls
training_launches_a_layer  a step of the trainer in bfloat16 with one row, whose completions share a prompt
training                   as `decode`. What torch compiles counts as the kernels that torch 2.13 makes of it
                           for compute capability 9.0. A call for many tensors is one launch
lora_launches_a_layer, lora  the same, of a step that trains a LoRA adapter of all matrices
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from common import ROOT, parser_of, report, table

from gpu import make_batch

sys.path.append(str(ROOT))

import torch
from tests.device_watch import META, trained_as_on_gpu, watched
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.algorithms import build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Adapter, Optimizer
from millrace.core.supported import TORCH_ENGINE
from millrace.engines.own.accelerated import flash
from millrace.engines.own.accelerated.fused import FusedPass
from millrace.engines.own.architecture import Architecture, architecture_of
from millrace.engines.own.attention import Kernel
from millrace.engines.own.parameters import Parameters
from millrace.trainer.adapted_linear import adapt
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.optimizer import grad_norm
from millrace.trainer.row_attention import NAME
from millrace.trainer.trainer import PolicyTrainer

LAYERS = (2, 4)
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in TORCH_ENGINE.families},
    "granite": ("granite", {"residual_multiplier": 0.22}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": LAYERS[0]}),
}
"""By a name: the family, and settings that its published models have."""
TRAINED = ("qwen3", "llama")
SLOTS, POSITIONS = 32, 1024
ROW = 4096


def a_layer(launches: Callable[[int], Counter[str]]) -> dict[str, float]:
    """Of each operation how often a layer launches it. `launches`: of a model with so many layers."""
    few, more = (launches(layers) for layers in LAYERS)
    more.subtract(few)
    return {name: count / (LAYERS[1] - LAYERS[0]) for name, count in sorted(more.items()) if count}


def config_of(name: str, layers: int) -> Any:
    family, more = MODELS[name]
    return AutoConfig.for_model(family, **SHAPE, **more, num_hidden_layers=layers)


def decode_launches(name: str, layers: int) -> Counter[str]:
    """Of a decode step with all slots."""
    shape = architecture_of(config_of(name, layers))
    steps, weights = recorded_steps(shape, META, slots=SLOTS, positions=POSITIONS)
    return watched(partial(steps.logits, weights, SLOTS)).counts


def recorded_steps(
    shape: Architecture, device: torch.device, *, slots: int, positions: int
) -> tuple[flash.RecordedSteps, Parameters]:
    """A model in bfloat16, as on a GPU: its decode steps and its weights."""
    whole = FusedPass(shape, positions, torch.bfloat16, device)
    whole.matmul, whole.mixture.grouped = flash.PADDED, shape.routed > 0
    sizes = (shape.num_layers, slots, shape.num_kv_heads, positions, shape.head_dim)
    cache = flash.FlashCache(sizes, torch.bfloat16, device)
    kernel = Kernel(shape.scale, shape.cap, shape.windows, exact=False, sinks=shape.sinks)
    steps = flash.RecordedSteps(whole, cache, kernel, shape)
    return steps, Parameters(shape, torch.bfloat16, device)


def training_launches(name: str, layers: int, *, lora: bool = False) -> Counter[str]:
    """Of a step with one row: forward, backward and optimizer."""
    config = config_of(name, layers)
    with META:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
        if lora:
            adapt(model, Adapter(rank=8), published=torch.bfloat16, seed=0)
    with trained_as_on_gpu(model) as watch:
        settings = StepSettings(Optimizer(), ROW, ROW, 1.0, torch.bfloat16, torch.bfloat16)
        trainer = PolicyTrainer(model, build(PolicyGradient()), settings)
        prepared = trainer._prepared(make_batch(ROW, num_rows=1), 1)

        def step() -> None:
            with trainer._serving():
                trainer._backward(prepared.rows[0][0], prepared.flat, 0.0, first=True)
            grad_norm(trainer.trained)
            trainer._update(1e-6, 1.0)
            trainer.forget_gradient()

        step()  # makes what is made once
        with watch:
            step()
    return watch.counts


def kind_of(name: str) -> str:
    """Of decode steps."""
    return "mixtures" if architecture_of(config_of(name, 1)).routed else "decode"


KINDS: dict[str, dict[str, Callable[[int], Counter[str]]]] = {
    **{
        kind: {name: partial(decode_launches, name) for name in MODELS if kind_of(name) == kind}
        for kind in ("decode", "mixtures")
    },
    "training": {name: partial(training_launches, name) for name in TRAINED},
    "lora": {name: partial(training_launches, name, lora=True) for name in TRAINED},
}
"""What is counted, and of which models: a figure each, the most that a layer of these launches."""


def figures(*kinds: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        rows = {name: a_layer(launches) for name, launches in KINDS[kind].items()}
        found[f"{kind}_launches_a_layer"] = max(sum(row.values()) for row in rows.values())
        found[kind] = rows
    return found


def main() -> None:
    options = parser_of(__doc__).parse_args()
    found = figures(*KINDS)
    for kind in KINDS:
        rows = found[kind]
        names = sorted({name for row in rows.values() for name in row})
        table({name: {case: row.get(name, 0.0) for case, row in rows.items()} for name in names}, first=kind)
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
