"""A model directory, read without torch: its files, its family, its positions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from millrace.config.schema import Config
from millrace.config.tables.generation import SamplingConfig
from millrace.conversations import tokenizer
from millrace.core.errors import ConfigError, DataError, boundary
from millrace.core.supported import JAX_TRAINER, TRAINER, refuse_unsupported
from millrace.core.turns.end_ids import end_ids
from millrace.placement.model_directory import read_model_config
from millrace.rollout.engine_kinds import ENGINES
from millrace.trainer.files.companion_files import CONFIG as ADAPTER_CONFIG
from millrace.trainer.files.companion_files import refuse_other_tokens

_ADAPTER = (
    ": it is an adapter of peft.\n  Write the whole model, with its tokenizer: "
    "`AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(DIR)`"
)


def model_problems(directory: Path) -> Iterator[str]:
    if not directory.is_dir():
        is_a_name = not directory.parent.exists()  # OWNER/MODEL was taken for a path
        name = "/".join(directory.parts[-2:]) if is_a_name else "OWNER/MODEL"
        fetch = f"millrace fetch {name} --to {shlex.quote(str(directory))}"
        yield (
            f"`model.path` ({directory}) is not a directory.\n  Name a Hugging Face model directory. "
            f"Nothing is downloaded by itself: `{fetch}` makes one, "
            f"so does `hf download {name} --local-dir DIR`"
        )
        return
    adapter = directory / ADAPTER_CONFIG
    if not (directory / "config.json").is_file():
        yield f"`model.path` ({directory}) has no config.json{_ADAPTER if adapter.is_file() else ''}"
    if not any(directory.glob("*.safetensors")):
        yield f"`model.path` ({directory}) has no *.safetensors weights"
    if not any((directory / name).is_file() for name in tokenizer.FILES):
        yield f"`model.path` ({directory}) has no tokenizer ({' or '.join(tokenizer.FILES)})"


def check_model(config: Config) -> None:
    """Raises: DataError: the trainer or the engine does not support the model, or its teacher has other
    tokens. ConfigError: sequences are longer than its positions, or `sampling` names a token or experts
    that it lacks."""
    model = read_model_config(Path(config.model.path))
    with boundary(f"`model.path` ({config.model.path})", "its config.json is of no model", DataError):
        can = ENGINES[config.rollout.engine].can
        trainer = JAX_TRAINER if config.trainer.backend == "jax" else TRAINER
        for supported in (trainer, can.quantised if config.rollout.quantization else can.models):
            if supported is not None:
                refuse_unsupported(filled_in(model), supported)
        longest = positions(model)
    if (teacher := config.teacher) is not None:
        refuse_other_tokens(teacher, config.model.path)
    _check_tokens(config.sampling, model.get("vocab_size"))
    experts = model.get("num_experts") or model.get("num_local_experts")
    if config.trainer.quantization and experts:
        raise ConfigError(
            f'`trainer.quantization` ("fp8"): the model in {config.model.path} has experts, which compute in '
            "bfloat16: little would be in fp8.\n  Leave it out"
        )
    if config.sampling.routing and not experts:
        raise ConfigError(
            f"`sampling.routing` (true): the model in {config.model.path} has no experts to record.\n"
            "  Set it to false"
        )
    tokens = config.rollout.max_sequence_tokens
    if longest is not None and tokens > longest:
        raise ConfigError(
            f"`rollout.max_sequence_tokens` ({tokens}) is more than the {longest} positions that the model "
            f"knows (`max_position_embeddings` in {Path(config.model.path) / 'config.json'}).\n"
            f"  Set it to at most {longest}, and `sampling.max_tokens` ({config.sampling.max_tokens}) lower"
        )


def _check_tokens(sampling: SamplingConfig, vocab: object) -> None:
    for key in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
        largest = max(getattr(sampling, key) or (0,))
        if isinstance(vocab, int) and largest >= vocab:
            raise ConfigError(
                f"`sampling.{key}` names token {largest}, and the model has {vocab} (`vocab_size` in "
                "config.json).\n  Look the ids up in the tokenizer of this model"
            )


def endless(config: Config) -> Iterator[str]:
    """A sentence if nothing but the budget ends a completion, and nobody asked for that."""
    path, sampling = config.model.path, config.sampling
    if sampling.stop or sampling.stop_token_ids or sampling.ignore_eos:
        return
    with suppress(DataError):  # which the engine says
        if not end_ids(path, None) and not end_ids(path, tokenizer.load_tokenizer(path)):
            yield (
                f"no token ends a completion: `eos_token_id` is null in {path}, and its tokenizer has none. "
                f"Each completion runs to `sampling.max_tokens` ({sampling.max_tokens}). Name the end: "
                "`eos_token_id` in generation_config.json, `eos_token` in tokenizer_config.json, or "
                "`sampling.stop_token_ids`"
            )


def positions(model: dict[str, Any]) -> int | None:
    """The longest sequence of a model, with scaled rotary embeddings; None: its config.json does not say."""
    longest, rope = model.get("max_position_embeddings"), _rope(model)
    if not isinstance(longest, int):
        return None
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings", longest)
    if isinstance(factor, int | float) and isinstance(original, int):
        return max(longest, int(factor * original))
    return longest


def filled_in(model: dict[str, Any]) -> SimpleNamespace:
    """Fill in the keys that `config.json` lacks and `refuse_unsupported` reads, as transformers does."""
    filled = {
        "model_type": model.get("model_type"),
        "rope_parameters": _rope(model),
        "hidden_act": model.get("hidden_act", "silu"),
    }
    return SimpleNamespace(**(model | filled))


def _rope(model: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters, under their new key or the old key."""
    return dict(model.get("rope_parameters") or model.get("rope_scaling") or {})
