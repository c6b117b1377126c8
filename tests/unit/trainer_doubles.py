"""Tiny random models and batches for the trainer's tests."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.algorithms import Algorithm, TokenLogprobs, build
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import OBSERVED, TokenColumns
from millrace.core.completion.token_masks import AllowedTokens
from millrace.core.digest import Filling, NamedBlock, NamedBuffer, TensorSpec, version_digest
from millrace.core.types import Batch, Endpoint, TrainGroup, TrainSequence
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.files.checkpoint import Saver
from millrace.trainer.ranks.mesh import ALONE, Ranks
from millrace.trainer.row_attention import NAME
from millrace.trainer.trainer import PolicyTrainer

VOCAB = 64
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    original = {} if kind == "default" else {"original_max_position_embeddings": 16}
    return {"rope_type": kind, "rope_theta": 500.0, **ROPES.get(kind, {}), **original, **more}


CONFIGS = {
    "qwen3": Qwen3Config(**SIZE, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZE, tie_word_embeddings=False),
    "qwen2, windows": Qwen2Config(**SIZE, **WINDOWS, use_sliding_window=True),
    "gemma3": Gemma3TextConfig(**SIZE, **WINDOWS, head_dim=16, query_pre_attn_scalar=16),
    "gemma3, capped": Gemma3TextConfig(**SIZE, **WINDOWS, head_dim=16, final_logit_softcapping=2.0),
    "gemma2": Gemma2Config(
        **SIZE,
        **WINDOWS,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=2.0,
    ),
    "glm4": Glm4Config(**SIZE, head_dim=16, pad_token_id=0),
    "gpt_oss": GptOssConfig(
        **SIZE,
        **WINDOWS,
        head_dim=16,
        pad_token_id=0,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=0.5,
        rope_parameters=rope("yarn", truncate=False),
    ),
    "granite": GraniteConfig(
        **SIZE,
        pad_token_id=0,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
    "smollm3": SmolLM3Config(**SIZE, pad_token_id=0, no_rope_layers=[1, 0]),
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=False, rope_parameters=rope("default")),
    "llama, llama3 rope": LlamaConfig(**SIZE, rope_parameters=rope("llama3")),
    "mistral": MistralConfig(**SIZE, sliding_window=6, rope_parameters=rope("default")),
    "mistral, yarn, no windows": MistralConfig(**SIZE, sliding_window=None, rope_parameters=rope("yarn")),
    "phi3": Phi3Config(**SIZE, sliding_window=6, pad_token_id=0, rope_parameters=rope("default")),
    "phi3, a part of a head": Phi3Config(
        **SIZE, pad_token_id=0, rope_parameters=rope("default", partial_rotary_factor=0.5)
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        rope_parameters=rope("default"),
    ),
    "qwen3_moe, a dense layer": Qwen3MoeConfig(
        **SIZE,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=6,
        rope_parameters=rope("default"),
    ),
}


def tiny_model(
    family: str = "qwen3", attention: str = NAME, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """The same weights for the same family and seed, whatever the attention. `changes`: to the family's
    configuration."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[family])
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():  # sharper than the default initialisation, so that errors show
        for parameter in model.parameters():
            parameter.mul_(1.0 if parameter.ndim == 1 else 4.0)
    return model.eval()


def save_tiny_model(directory: Path, family: str = "qwen3", **changes: Any) -> Path:
    tiny_model(family, **changes).save_pretrained(directory)
    return directory


def make_batch(version: int = 0, *, seed: int = 0, groups: int = 3, group_size: int = 4) -> Batch:
    """Groups of random lengths with random rewards, masks and stale log-probs."""
    random = np.random.default_rng([seed, version])
    made = []
    for group_id in range(groups):
        prompt = random.integers(0, VOCAB, int(random.integers(3, 12))).tolist()
        sequences = [_sequence(group_id * group_size + i, random, version) for i in range(group_size)]
        made.append(TrainGroup(group_id, prompt, sequences))
    return Batch(version, made)


def _sequence(trajectory_id: int, random: np.random.Generator, version: int) -> TrainSequence:
    length = int(random.integers(1, 20))
    switch = int(random.integers(0, length + 1))
    return TrainSequence(
        trajectory_id=trajectory_id,
        columns=TokenColumns.of(
            random.integers(0, VOCAB, length).tolist(),
            random.uniform(-6, -2, length).tolist(),
            [max(0, version - 1)] * switch + [version] * (length - switch),
        ),
        mask=(random.random(length) < 0.8).tolist(),
        reward=float(random.integers(0, 2)) + trajectory_id % 3,
        truncated=bool(random.integers(0, 2)),
    )


def choosing(batch: Batch, seed: int = 0) -> Batch:
    """The batch, with sets of 1 to 9 tokens that could have come. Every fifth token could be any."""
    random, groups = np.random.default_rng(seed), []
    for group in batch.groups:
        sequences = []
        for sequence in group.sequences:
            columns = sequence.columns[:]
            columns.token_masks = AllowedTokens()
            for token in columns.tokens:
                others = random.choice(VOCAB, int(random.integers(0, 9)), replace=False)
                could = np.union1d(others, [token]) if random.random() < 0.8 else np.empty(0)
                columns.token_masks.append(could.astype(np.int32).tobytes())
            sequences.append(msgspec.structs.replace(sequence, columns=columns))
        groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, groups)


def observed(batch: Batch) -> tuple[Batch, Batch]:
    """The batch with observed tokens where its masks are False, and the same batch with log-probs and
    versions there. Every completion begins with a sampled token."""
    pair: list[list[TrainGroup]] = [[], []]
    for group in batch.groups:
        members: list[list[TrainSequence]] = [[], []]
        for sequence in group.sequences:
            mask, columns = np.array(sequence.mask), sequence.columns
            mask[0] = True
            logprobs = np.where(mask, columns.logprobs, np.nan)
            versions = np.where(mask, columns.versions(), OBSERVED)
            seen = TokenColumns.of(columns.tokens, logprobs, versions.tolist())
            seen.token_masks, seen.top_logprobs = columns.token_masks, columns.top_logprobs
            for each, of_each in zip(members, (seen, columns), strict=True):
                each.append(msgspec.structs.replace(sequence, columns=of_each, mask=mask.tolist()))
        for groups, sequences in zip(pair, members, strict=True):
            groups.append(msgspec.structs.replace(group, sequences=sequences))
    return Batch(batch.version, pair[0]), Batch(batch.version, pair[1])


def make_trainer(
    algorithm: Any = None,
    *,
    model: PreTrainedModel | None = None,
    reference: PreTrainedModel | bool = False,
    ranks: Ranks = ALONE,
    **changes: Any,
) -> PolicyTrainer:
    settings: dict[str, Any] = {
        "optimizer": Optimizer(lr=1e-3, grad_clip=None),
        "token_budget": 4096,
        "max_tokens": 24,
        "temperature": 1.0,
        "dtype": torch.float32,
        "published": torch.float32,
    }
    return PolicyTrainer(
        model or tiny_model(),
        algorithm if isinstance(algorithm, Algorithm) else build(algorithm or PolicyGradient()),
        StepSettings(**settings | changes),
        reference=tiny_model(seed=1) if reference is True else reference or None,
        ranks=ranks,
    )


def by_sequence(xp: Any, logprobs: TokenLogprobs, advantages_N: Any) -> Any:
    """A loss weighted by what the tokens of a sequence have in common."""
    ratio_N = logprobs.fixed_N - logprobs.behavior_N
    mean_N, total_N = logprobs.sequences.mean(ratio_N), logprobs.sequences.total(ratio_N)
    return -xp.exp(mean_N) * xp.clip(total_N, -2.0, 2.0) * advantages_N * logprobs.current_N


def whole_sequences(**changes: Any) -> Algorithm:
    """An algorithm that combines the tokens of a sequence, and trains on what is not truncated."""
    return Algorithm(
        advantages=build(PolicyGradient()).advantages,
        objective=by_sequence,
        trained=lambda group: ~group.truncated_G,
        **changes,
    )


def save_checkpoint(trainer: PolicyTrainer, directory: Path) -> Path:
    saver = Saver(trainer.optimizer, trainer.ranks)
    saver.begin(trainer, directory)
    return Path(saver.result().path)


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def sequence_logprobs(
    model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """The plain way: one sequence, one forward, all logits."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


class MemoryWriter:
    """A `WeightsWriter` that keeps copies of what was written."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint, self.closed = endpoint, False
        self.written: list[tuple[int, dict[str, bytes]]] = []
        self.ended: list[int] = []

    def begin(self, version: int, manifest: list[TensorSpec]) -> Filling:
        return Filling(version, 0, 1)

    def fill(self, filling: Filling, manifest: list[TensorSpec], blocks: list[NamedBuffer]) -> None:
        self.written.append((filling.version, {block.name: bytes(block.data) for block in blocks}))

    def end(
        self,
        filling: Filling,
        manifest: list[TensorSpec],
        written: Iterable[NamedBlock],
        elsewhere: Iterable[NamedBlock] = (),
    ) -> str:
        pieces = dict(written)
        self.ended.append(filling.version)
        return version_digest((s.name, s.dtype, s.shape, pieces[s.name].digest) for s in manifest)

    def close(self) -> None:
        self.closed = True


WRITERS: list[MemoryWriter] = []


def open_memory_writer(endpoint: Endpoint) -> MemoryWriter:
    WRITERS.append(MemoryWriter(endpoint))
    return WRITERS[-1]


def role_config(path, /, **changes):
    """The configuration of a trainer's role, as it is sent there."""
    config = {
        "model": {"path": str(path), "device": "cpu"} | changes.pop("model", {}),
        "task": {"kind": "gym", "name": "chain_sum"},
        "reward": {"kind": "gym"},
        "optimizer": {"lr": 1e-3},
    }
    return config | changes
