"""An engine of any kind on a bench: a relay's ring feeds it, and a trainer says what is right."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from millrace.config.tables.training import Adapter
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.types import Finish, Progress, Sampling, Work
from millrace.rollout.engine_kinds import open_engine
from millrace.rollout.protocol import Engine, EngineOptions
from millrace.trainer.adapted_linear import adapt, adapted_layers, published_weights
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.model import named_weights, row_logprobs
from millrace.trainer.publish.publisher import PublishBuffers
from millrace.trainer.row_attention import NAME
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader, open_writer

VOCAB, END = 128, 1
ALPHABET = "".join(map(chr, range(0x100, 0x100 + VOCAB - 5)))  # beside five special tokens
STEPS_MAX = 20_000
LAYER_TYPES = ["sliding_attention", "full_attention"]

# What the engine under test computes on and in: `--device` and `--dtype`.
DEVICE, DTYPE = "cpu", torch.float32
TOLERANCE = 1e-4  # in nats, of a log-prob
TOLERANCES = {("cpu", torch.float32): TOLERANCE, ("cuda", torch.float32): 5e-4}
TOLERANCE_BFLOAT16 = 0.3

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW = {**_SHAPE, "sliding_window": 48}
_GEMMA = {**_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32, "layer_types": LAYER_TYPES}
MODELS: dict[str, Any] = {
    f"{name} {'tied' if tied else 'untied'}": config(**_SHAPE, **more, tie_word_embeddings=tied)
    for name, config, more in (
        ("qwen2", Qwen2Config, {}),
        ("qwen3", Qwen3Config, {"head_dim": 32}),
        ("llama", LlamaConfig, {"head_dim": 32}),
    )
    for tied in (True, False)
} | {
    "mistral": MistralConfig(**_WINDOW),
    "phi3": Phi3Config(**_WINDOW),
    "qwen3_moe": Qwen3MoeConfig(
        **_SHAPE,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "gemma2": Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=10.0),
    "gemma3": Gemma3TextConfig(**_GEMMA),
    "glm4": Glm4Config(**_SHAPE, head_dim=32),
    "granite": GraniteConfig(
        **_SHAPE,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
    "gpt_oss": GptOssConfig(
        **_WINDOW,
        head_dim=32,
        layer_types=LAYER_TYPES,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 5e3,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    ),
    "smollm3": SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0]),
}

DENSE = [name for name, config in MODELS.items() if not hasattr(config, "num_experts_per_tok")]
"""Models whose matrices can have adapters."""


@cache
def make_model(name: str, seed: int) -> PreTrainedModel:
    """A random model as the trainer has it, spread out enough that its choices are clear."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=NAME).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(part in key for part in ("norm", "bias", "sinks")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(2.0)
            parameter.copy_(parameter.to(DTYPE))
    return model


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, length).tolist()


@dataclass
class Played:
    """What came of a trajectory here: the tokens after `work.tokens`."""

    work: Work
    columns: TokenColumns = field(default_factory=TokenColumns)
    finish: Finish | None = None

    @property
    def tokens(self) -> list[int]:
        return self.columns.tokens.tolist()


class Bench:
    def __init__(self, kind: str, directory: Path, model: str, **options: Any) -> None:
        self.model_name = model
        make_model(model, 0).save_pretrained(directory)
        make_character_tokenizer(directory, ALPHABET)
        usual = {
            "slots": 8,
            "max_sequence_tokens": 256,
            "prefill_chunk": 64,
            "keep_kv": False,
            "probe": False,
        }
        usual["dtype"] = str(DTYPE).removeprefix("torch.")
        self.options = EngineOptions(model_path=str(directory), device=DEVICE, **(usual | options))
        self.engine = self.open_engine(kind)
        self.models: dict[int, PreTrainedModel] = {}
        self.digests: dict[int, str] = {}
        self.relay, buffers = RelayWorker("relay", slots=3), self._buffers(make_model(model, 0))
        self.endpoint = asyncio.run(self.relay.open(buffers.weights_bytes))
        self._writer, self.reader = open_writer(self.endpoint), open_reader(self.endpoint)
        self._ids, self.played = itertools.count(), dict[int, Played]()
        self.used = self.closed = False

    def open_engine(self, kind: str) -> Engine:
        return open_engine(kind, self.options)

    def close(self) -> None:
        """A second call changes nothing."""
        if self.closed:
            return
        self.closed = True
        self._writer.close()
        self.reader.close()
        self.engine.close()

    def clear(self) -> None:
        """Let the engine forget what it works on."""
        self.engine.release(list(self.played))
        self.played.clear()
        assert not self.engine.has_work and not self.engine.has_finished

    # ------------------------------------------------------------ weights

    def publish(self, seed: int) -> int:
        """Put the weights of `seed` into the ring as the next version."""
        version = max(self.models, default=-1) + 1
        self.models[version] = make_model(self.model_name, seed)
        self.digests[version] = self._writer.write(version, self._buffers(self.models[version]).fill())
        asyncio.run(self.relay.stage(version, self.digests[version]))
        return version

    def publish_adapter(self, seed: int, adapter: Adapter, base: int = 0) -> int:
        """Put an adapter of the weights of seed `base` into the ring. The engine was opened with those of 0.
        What is right is the model with the adapter merged."""
        version, trained = max(self.models, default=-1) + 1, copy.deepcopy(make_model(self.model_name, base))
        whole = copy.deepcopy(trained)
        adapt(trained, adapter, published=DTYPE, seed=seed)
        for name, layer in adapted_layers(trained).items():
            layer.lora_B.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(seed))
            whole.get_submodule(name).weight.data.copy_(layer.merged().to(DTYPE))
        buffers = PublishBuffers(published_weights(trained, DTYPE), DTYPE)
        self.models[version] = whole
        self.digests[version] = self._writer.write(version, buffers.fill())
        asyncio.run(self.relay.stage(version, self.digests[version]))
        return version

    def serve(self, seed: int) -> int:
        """Publish the weights of `seed` and have the engine serve them."""
        version = self.publish(seed)
        self.load(version)
        return version

    def load(self, version: int) -> None:
        staged, loaded = self.engine.stage(version, self.reader)
        assert staged == loaded == self.digests[version]
        self.engine.swap(version)
        assert self.engine.version == version

    def _buffers(self, model: PreTrainedModel) -> PublishBuffers:
        return PublishBuffers(named_weights(model), getattr(torch, self.options.dtype))

    # ------------------------------------------------------------ work

    def work(self, prompt: Sequence[int], sampling: Sampling, **fields: Any) -> Work:
        trajectory_id = fields.pop("trajectory_id", None)
        trajectory_id = next(self._ids) if trajectory_id is None else trajectory_id
        tokens = token_array(fields.pop("tokens", ()))
        defaults = {"group_id": trajectory_id, "lease": 0, "seed": 7} | fields
        return Work(trajectory_id, prompt=token_array(prompt), tokens=tokens, sampling=sampling, **defaults)

    def submit(self, works: Iterable[Work]) -> None:
        works = list(works)
        self.engine.submit(works)
        self.played |= {work.trajectory_id: Played(work) for work in works}

    def take(self) -> None:
        """Note what the engine has to tell."""
        for part in self.engine.take_progress():
            self.note(part)

    def note(self, part: Progress) -> None:
        played = self.played[part.trajectory_id]
        assert part.lease == played.work.lease and played.finish is None
        assert part.start == len(played.work.tokens) + len(played.columns)
        played.columns.extend(part.columns)
        played.finish = part.finish

    def step(self) -> None:
        self.engine.step()
        self.take()

    def sample(self, tokens: int) -> None:
        """Step until so many tokens have come of each trajectory that goes on."""
        for _ in range(STEPS_MAX):
            if all(p.finish is not None or len(p.columns) >= tokens for p in self.played.values()):
                return
            self.step()
        raise AssertionError(f"no {tokens} tokens of each in {STEPS_MAX} steps: {self.engine.load()}")

    def drain(self) -> dict[int, Played]:
        """Step until nothing is left to do. By trajectory, what came of all that was submitted."""
        for _ in range(STEPS_MAX):
            if not (self.engine.has_work or self.engine.has_finished):
                return dict(self.played)
            self.step()
        raise AssertionError(f"work is left after {STEPS_MAX} steps: {self.engine.load()}")

    def play(self, works: Iterable[Work]) -> list[Played]:
        """Submit works and generate them to their end; in their order."""
        works = list(works)
        self.submit(works)
        played = self.drain()
        return [played[work.trajectory_id] for work in works]

    def release(self, trajectory_id: int) -> Played:
        """What was sampled here, reported or not."""
        (part,) = self.engine.release([trajectory_id])
        played = self.played.pop(trajectory_id)
        assert part.start == len(played.work.tokens)
        assert part.columns[: len(played.columns)] == played.columns
        return Played(played.work, part.columns, part.finish)

    # ------------------------------------------------------------ what is right

    @torch.inference_mode()
    def logits(self, version: int, one: Played) -> torch.Tensor:
        """Hugging Face's, (tokens, vocabulary), of every token that was sampled here."""
        model = copy.deepcopy(self.models[version])
        model.set_attn_implementation("eager")
        sequence = [*one.work.prompt, *one.work.tokens, *one.tokens]
        return model(torch.tensor([sequence])).logits[0, -len(one.columns) - 1 : -1]

    def check(self, played: Iterable[Played]) -> None:
        """Every log-prob is the trainer's, with the weights of the version that its token names."""
        by_version: dict[int, list[Played]] = {}
        for one in played:
            for version, _ in one.columns.runs:
                by_version.setdefault(version, []).append(one)
        for version, some in by_version.items():
            expected = trainer_logprobs(self.models[version], some)
            for one, logprobs in zip(some, expected, strict=True):
                mine = np.array(one.columns.versions()) == version
                gap = np.abs(np.array(one.columns.logprobs) - logprobs)[mine].max()
                assert gap < TOLERANCE, (version, gap, one.work.trajectory_id, one.columns.runs)


OpenBench = Callable[..., Bench]


@torch.inference_mode()
def trainer_logprobs(model: PreTrainedModel, played: Sequence[Played]) -> list[np.ndarray]:
    """Of every token that was sampled here, as a training step would compute them, at their temperature."""
    (temperature,) = {one.work.sampling.temperature or 1.0 for one in played}
    trees, first = [], 0
    for one in played:
        completion = np.array([*one.work.tokens, *one.columns.tokens])
        mask = np.arange(len(completion)) >= len(one.work.tokens)
        trees.append(Tree(np.asarray(one.work.prompt), [Branch(completion, mask, first)]))
        first += len(completion)
    flat = np.zeros(first)
    for row in pack(trees, 4096):
        logprobs, _ = row_logprobs(model, row, temperature=temperature, dtype=torch.float32)
        flat[row.flat_N] = logprobs.numpy()
    lengths = [len(one.work.tokens) + len(one.columns) for one in played]
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    return [part[len(one.work.tokens) :] for part, one in zip(parts, played, strict=True)]
