"""What a step needs for a moment: the estimate beside what torch really saves, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import covering
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace.config.schema import Config
from millrace.core.placement import Gpu, Host
from millrace.placement.assign import assign
from millrace.placement.describe import table, warnings
from millrace.placement.memory import activation_memory
from millrace.placement.memory.activation_memory import (
    CHUNK_BYTES,
    GPU_CHUNK_BYTES,
    ActivationMemory,
    Phase,
    estimate,
)
from millrace.placement.memory.model_shape import Shape
from millrace.placement.memory.needs import MemoryNeed, Needs
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.kernels.products import ROUNDED
from millrace.trainer.model import install_kernels, recompute_layers, row_logprobs, served_weights
from millrace.trainer.ranks.mesh import ALONE
from millrace.trainer.row_attention import NAME
from millrace.trainer.row_logprobs import CHUNK_LOGITS, GPU_CHUNK_LOGITS

GB = 10**9
SHAPE = Shape(6, hidden=64, intermediate=192, vocabulary=301, query_heads=4, kv_heads=2, head_dim=16)
TOKENS = 544


def config_for(**sections: Any) -> Config:
    whole = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "gcd"}, "reward": {"kind": "gym"}}
    return Config.model_validate({**whole, **sections})


def saved_bytes(
    family: Any, dtype: torch.dtype, *, group: int, recompute: bool = False, on_gpu: bool = True
) -> int:
    """What the forward pass of a row of `TOKENS` tokens leaves for the gradient, parameters not counted. The
    layers are those of transformers, as on a GPU, or those of a trainer alone on a CPU."""
    model = AutoModelForCausalLM.from_config(
        family(
            vocab_size=SHAPE.vocabulary,
            hidden_size=SHAPE.hidden,
            intermediate_size=SHAPE.intermediate,
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.query_heads,
            num_key_value_heads=SHAPE.kv_heads,
            head_dim=SHAPE.head_dim,
            attn_implementation=NAME,
        )
    ).eval()
    if not on_gpu:
        install_kernels(model, torch.device("cpu"), ALONE)
    if recompute:
        recompute_layers(model)
    random, length = np.random.default_rng(0), (TOKENS - 32) // group
    drawn = [random.integers(0, SHAPE.vocabulary, length).tolist() for _ in range(group)]
    prompt = random.integers(0, SHAPE.vocabulary, 32).tolist()
    branches = [Branch(tokens, np.ones(length, bool), i * length) for i, tokens in enumerate(drawn)]
    [row] = pack([Tree(prompt, branches)], 10**9)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with served_weights(model, published=torch.float32, computing=dtype):
        weights |= {
            module.rounded.untyped_storage().data_ptr()
            for module in model.modules()
            if hasattr(module, ROUNDED)
        }
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            kept = row_logprobs(model, row, temperature=1.0, dtype=dtype)
        assert len(kept[0])
    return sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in weights)


EXPERTS = partial(Qwen3MoeConfig, num_experts=8, num_experts_per_tok=4, moe_intermediate_size=48)
FAMILIES: dict[str, tuple[Any, Shape]] = {
    **{kind.model_type: (kind, SHAPE) for kind in (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig)},
    "gemma3_text": (Gemma3TextConfig, replace(SHAPE, norms_after=True)),
    "gemma2": (Gemma2Config, replace(SHAPE, norms_after=True, composed=True)),
    "qwen3_moe": (EXPERTS, replace(SHAPE, routed=4)),
    "gpt_oss": (
        partial(GptOssConfig, num_local_experts=8, num_experts_per_tok=4, pad_token_id=0),
        replace(SHAPE, intermediate=4 * SHAPE.intermediate, routed=4, composed=True, clamped=True),
    ),
}


@pytest.mark.parametrize(
    ("family", "number", "group", "place"),
    covering(FAMILIES, [(torch.float32, 4), (torch.bfloat16, 2)], [1, 4], ["gpu", "cpu", "cpu, large model"]),
)
def test_activations_are_about_what_torch_saves(
    family: str, number: tuple[torch.dtype, int], group: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dtype, size), on_gpu = number, place == "gpu"
    if place == "cpu, large model":
        monkeypatch.setattr(activation_memory, "SPARING_MIN", 0)
    kind, shape = FAMILIES[family]
    longest = {"max_sequence_tokens": 32 + (TOKENS - 32) // group}
    estimated_bytes = (
        estimate(config_for(rollout=longest), shape, size, on_gpu=on_gpu).head.token_bytes - 12 * SHAPE.hidden
    ) * TOKENS
    error = 0.2 if on_gpu else 0.25
    if shape.clamped:  # how many copies of scores gpt-oss keeps depends on the CPU
        error = 0.3
    saved = saved_bytes(kind, dtype, group=group, on_gpu=on_gpu)
    assert saved == pytest.approx(estimated_bytes, rel=error)


def test_with_recompute_hardly_more_than_a_layers_input_is_kept() -> None:
    layers_input = 4 * SHAPE.hidden * SHAPE.layers * TOKENS
    saved = saved_bytes(Qwen3Config, torch.float32, group=1, recompute=True)
    assert (
        layers_input
        < saved
        < estimate(config_for(model={"path": "m", "recompute": True}), SHAPE, 4).layer.token_bytes * TOKENS
    )


def test_the_trainers_chunk_of_logits_is_the_one_that_is_counted() -> None:
    assert (CHUNK_LOGITS * 4, GPU_CHUNK_LOGITS * 4) == (CHUNK_BYTES, GPU_CHUNK_BYTES)


def test_a_micro_batch_is_the_budget_or_a_longer_sequence_and_never_more_than_the_step() -> None:
    def tokens(**sections: Any) -> int:
        return estimate(config_for(**sections), SHAPE, 4).micro_batch_tokens

    few = {"prompts": 1, "group_size": 2, "token_budget": 8192}
    assert tokens() == 8192
    assert tokens(batch=few) == 2 * 512
    assert tokens(rollout={"max_sequence_tokens": 20_000}) == 20_000


MOMENT = ActivationMemory(8192, Phase(1_000_000, GB // 2), replica_bytes=GB)
NEEDS = Needs(500_000_000, GB, 12_000, MemoryNeed(0, 9 * GB), MemoryNeed(0, 7 * GB), 6 * GB, MOMENT)
ON_GPU = replace(NEEDS, trainer=MemoryNeed(8 * GB, GB), replica=MemoryNeed(5 * GB, 2 * GB))


def warnings_of(needs: Needs, host: Host, **sections: Any) -> list[str]:
    config = config_for(**sections)
    return list(warnings(assign(config, host, needs), config))


def test_a_micro_batch_that_may_not_fit_is_told_with_the_budget_that_does() -> None:
    """Kept: 9 + 2 x 7 GB, shared 2.5, for a moment 2 x 1 in the replicas: 3 of 30.5 GB are left for 4.6."""
    [said] = warnings_of(NEEDS, Host("host", 16, 100 * GB, 305 * GB // 10))
    assert "a micro-batch of 4,096 tokens, the largest, needs about 4.6 GB in the trainer" in said
    assert "3.0 GB of host memory are left" in said
    assert said.endswith("`batch.token_budget` (8,192) to 2,500, or set `model.recompute` to true")
    assert not warnings_of(NEEDS, Host("host", 16, 100 * GB, 365 * GB // 10))
    assert "a micro-batch in the trainer" in table(
        assign(config_for(), Host("h", 16, 100 * GB, 365 * GB // 10), NEEDS)
    )


def test_a_sequence_that_is_too_long_for_the_memory_is_told_as_such() -> None:
    long = {"rollout": {"max_sequence_tokens": 6000}, "model": {"path": "m", "recompute": True}}
    [said] = warnings_of(NEEDS, Host("host", 16, 100 * GB, 335 * GB // 10), **long)
    assert said.endswith("`rollout.max_sequence_tokens` (6,000): 5,500 tokens fit")


def test_on_a_gpu_trainer_and_replicas_are_told_apart() -> None:
    gpus = tuple(Gpu(i, "small", 16 * GB, 16 * GB) for i in range(2))
    said = warnings_of(ON_GPU, Host("host", 16, 100 * GB, 100 * GB, gpus), rollout={"replicas": 1})
    assert len(said) == 1 and "7.5 GB of GPU 0 are left for it" in said[0]
    greedy = replace(ON_GPU, activation_memory=replace(MOMENT, head=Phase(1), replica_bytes=11 * GB))
    said = warnings_of(greedy, Host("host", 16, 100 * GB, 100 * GB, gpus), rollout={"replicas": 1})
    assert len(said) == 1 and said[0].startswith(
        "replica-0 needs about 11.0 GB for a moment, and 10.5 GB of GPU 1"
    )


def test_on_one_gpu_a_replica_gets_what_its_steps_need() -> None:
    host = Host("host", 16, 100 * GB, 100 * GB, (Gpu(0, "large", 100 * GB, 100 * GB),))
    assert assign(config_for(), host, ON_GPU).replicas[0].share == pytest.approx((5 + 1 + 0.5 + 0.5) / 100)


def test_what_edits_or_cuts_logits_takes_more_of_a_replica() -> None:
    """Beside a vocabulary of this size the prefill is nothing."""
    large = replace(SHAPE, vocabulary=10**6)

    def bytes_each(**sampling: Any) -> float:
        config = config_for(sampling=sampling, rollout={"slots": 10})
        return estimate(config, large, 4).replica_bytes / 10**7

    plain, edited = {}, {"presence_penalty": 0.5}
    assert [bytes_each(**asked) for asked in (plain, edited, {"banned_token_ids": [3]})] == [20, 26, 26]
    assert [bytes_each(**asked, min_p=0.1) for asked in (plain, edited)] == [48, 54]
    assert bytes_each(top_k=5) == bytes_each(top_p=0.9) == 48
