"""Tiny random models, works and a plain drive loop for the tests of the torch engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from millrace.core.errors import ConfigError
from millrace.core.types import Finish, Progress, Sampling, Work
from millrace.engines.own.architecture import architecture_of
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.protocol import EngineOptions

VOCAB, EOS = 101, 1

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 111,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


_WINDOWS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GEMMA = {**_SHAPE, **_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 24}
_EXPERTS: dict[str, Any] = {
    **_SHAPE,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, Any] = {
    "llama tied": LlamaConfig(
        **_SHAPE, num_key_value_heads=2, head_dim=18, tie_word_embeddings=True, rope_parameters=_rope(500.0)
    ),
    "llama biases, llama3 rope": LlamaConfig(
        **_SHAPE,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "qwen2 untied": Qwen2Config(
        **_SHAPE, num_key_value_heads=2, tie_word_embeddings=False, rope_parameters=_rope(1e6)
    ),
    "qwen3 tied": Qwen3Config(
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,
        rope_parameters=_rope(1e4),
    ),
    "qwen3 untied, no grouping": Qwen3Config(
        **_SHAPE, num_key_value_heads=4, head_dim=16, tie_word_embeddings=False, rope_parameters=_rope(1e6)
    ),
    "qwen2, windows": Qwen2Config(**_SHAPE, **_WINDOWS, use_sliding_window=True),
    "mistral": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=24),
    "phi3": Phi3Config(
        **_SHAPE | {"hidden_size": 64},
        num_key_value_heads=2,
        sliding_window=24,
        rope_parameters=_rope(1e4, partial_rotary_factor=0.5),
    ),
    "qwen3_moe": Qwen3MoeConfig(**_EXPERTS, norm_topk_prob=True),
    "qwen3_moe, a dense layer": Qwen3MoeConfig(**_EXPERTS, mlp_only_layers=[0]),
    "gemma2": Gemma2Config(**_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**_GEMMA, hidden_activation="gelu"),
    "glm4": Glm4Config(**_SHAPE | {"hidden_size": 64}, num_key_value_heads=2, head_dim=16),
    "gpt_oss": GptOssConfig(
        **_SHAPE | _WINDOWS | {"intermediate_size": 112},
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=2.0,
        rope_parameters=_rope(500.0)
        | {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 64},
    ),
    "granite": GraniteConfig(
        **_SHAPE,
        num_key_value_heads=2,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
    "smollm3": SmolLM3Config(**_SHAPE | {"hidden_size": 64}, num_key_value_heads=2, no_rope_layers=[1, 0]),
}


def make_model(name: str = "qwen3 tied", seed: int = 0, scale: float = 3.0) -> Any:
    """A random Hugging Face model, spread out enough that its choices are clear."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("norm", "bias", "sinks")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model


def weights_into(engine: TorchEngine, model: Any) -> None:
    """Write the model's parameters into the engine's standby buffers, as a pull does."""
    named = dict(model.named_parameters())
    for buffer in engine.standby_buffers():
        buffer.data[:] = named[buffer.name].detach().view(-1).view(torch.uint8)


def make_exact_engine(model: Any, version: int = 0, **options: Any) -> TorchEngine:
    """Skips the test where exactness cannot be had."""
    try:
        return make_engine(model, version, exact=True, **options)
    except ConfigError as error:
        pytest.skip(str(error))


def make_engine(model: Any, version: int = 0, **options: Any) -> TorchEngine:
    ends, decode = options.pop("eos_ids", {EOS}), options.pop("decode", None)
    usual = {
        "model_path": "",
        "device": "cpu",
        "slots": 16,
        "max_sequence_tokens": 320,
        "keep_kv": False,
        "probe": False,
    }
    asked = EngineOptions(**usual | options)
    engine = TorchEngine(architecture_of(model.config), asked, eos_ids=ends, decode=decode)
    weights_into(engine, model)
    engine.swap(version)
    return engine


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_work(trajectory_id: int, prompt: list[int], sampling: Sampling, **fields: Any) -> Work:
    defaults: dict[str, Any] = {"group_id": trajectory_id, "lease": 0, "tokens": [], "seed": 7}
    return Work(trajectory_id, prompt=prompt, sampling=sampling, **(defaults | fields))


def drain(engine: TorchEngine) -> list[Progress]:
    progress: list[Progress] = []
    while engine.has_work or engine.has_finished:
        engine.step()
        progress += engine.take_progress()
    return progress


def run(engine: TorchEngine, works: Sequence[Work]) -> dict[int, tuple[list[int], list[float], Finish]]:
    """Tokens, log-probs and finish of every trajectory."""
    engine.submit(works)
    return collect(drain(engine))


def collect(progress: Sequence[Progress]) -> dict[int, tuple[list[int], list[float], Finish]]:
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    finishes: dict[int, Finish] = {}
    for part in progress:
        tokens.setdefault(part.trajectory_id, []).extend(part.columns.tokens)
        logprobs.setdefault(part.trajectory_id, []).extend(part.columns.logprobs)
        if part.finish is not None:
            finishes[part.trajectory_id] = part.finish
    return {key: (tokens[key], logprobs[key], finishes[key]) for key in tokens}


def teacher_forced(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Hugging Face's logits (completion, vocabulary) for every completion token."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion])).logits[0]
    return logits[len(prompt) - 1 : -1]
