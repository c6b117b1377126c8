"""vLLM's arguments for sampling, for calls in its process or over HTTP, and for drafts. Names no vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from millrace.core.errors import ConfigError
from millrace.core.types import ReplicaLoad
from millrace.placement.memory.model_shape import kv_token_bytes
from millrace.placement.model_directory import read_model_config
from millrace.rollout.continuation import Continuation
from millrace.rollout.engine_kinds import HAVE_WEIGHTS
from millrace.rollout.noise import Noise
from millrace.rollout.protocol import EngineOptions

# Fields of `Sampling` that mean the same to vLLM. vLLM counts presence and frequency from the start of a
# request, and can ban only strings.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_arguments(continuation: Continuation, *, seeded: bool = True) -> dict[str, Any]:
    """The arguments for the rest of `continuation`: tokens with their log-probs, and no text. Not `seeded`:
    all requests share vLLM's own noise."""
    sampling = continuation.work.sampling
    allowed = sampling.allowed_token_ids
    return {
        **{name: getattr(sampling, name) for name in _SAME},
        "allowed_token_ids": None if allowed is None else list(allowed),
        "seed": _seed(continuation) if seeded else None,
        "max_tokens": continuation.tokens_left,
        "stop_token_ids": sorted(continuation.stop_ids),
        "ignore_eos": True,  # `stop_ids` has the model's end tokens
        "logprobs": sampling.logprobs,
        "detokenize": False,
    }


def _seed(continuation: Continuation) -> int:
    """The seed of the next tokens. After a move, noise that was used before must not come again."""
    work = continuation.work
    uniform = Noise([work.seed], [work.trajectory_id]).uniforms([len(continuation.tokens)], 1)[0, 0]
    return int(uniform * 2**52)


# ---------------------------------------------------------------- drafts


NGRAM_TOKENS = (2, 5)
"""A draft follows an earlier copy of the last tokens: at least and at most so many."""
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of models' configurations that count layers for multi-token prediction."""


def draft_arguments(options: EngineOptions) -> dict[str, Any]:
    """Arguments of vLLM's engine. Its statistics are on, as they count drafts.

    Raises: as `refuse_missing_parts`."""
    if options.drafts is None:
        return {}
    refuse_missing_parts(options)
    return {"speculative_config": _speculative_config(options), "disable_log_stats": False}


def _speculative_config(options: EngineOptions) -> dict[str, Any]:
    drafts, rows = options.drafts, options.draft_rows_max
    settings: dict[str, Any] = {"method": drafts, "num_speculative_tokens": options.draft_tokens}
    if rows < options.slots:  # the proof's request is one row more
        most = [(1, rows, options.draft_tokens), (rows + 1, options.slots + 1, 0)]
        settings["num_speculative_tokens_per_batch_size"] = most
    if drafts == "ngram":
        settings["prompt_lookup_min"], settings["prompt_lookup_max"] = NGRAM_TOKENS
    if drafts in HAVE_WEIGHTS:  # the model's own come from the relay
        settings["draft_load_config"] = {"load_format": "auto"}
    if drafts == "eagle":
        assert options.draft_model is not None
        names = read_model_config(Path(options.draft_model)).get("architectures") or [""]
        settings |= {"model": options.draft_model, "method": "eagle3" if "Eagle3" in names[0] else "eagle"}
    return settings


def refuse_missing_parts(options: EngineOptions) -> None:
    """Raises: ConfigError: a directory or layers that the drafts need are missing."""
    if options.drafts == "eagle" and not (
        options.draft_model and (Path(options.draft_model) / "config.json").is_file()
    ):
        raise ConfigError(
            f"`rollout.draft_model` ({options.draft_model}) is no directory with a config.json.\n"
            "  Name the directory of an EAGLE or EAGLE-3 head of the model"
        )
    if options.drafts == "mtp":
        model = read_model_config(Path(options.model_path))
        if not any(model.get(key) for key in MTP_LAYERS):
            raise ConfigError(
                f'`rollout.drafts` ("mtp") needs layers for multi-token prediction, and {options.model_path} '
                f"has none: its config.json has none of {', '.join(MTP_LAYERS)}.\n"
                '  Take "ngram", "suffix" or "eagle", or leave `rollout.drafts` out'
            )


def draft_cache_bytes(options: EngineOptions, size: int) -> int:
    """Keys and values of one token in the layers of drafts, with numbers of `size` bytes."""
    if options.drafts == "eagle" and options.draft_model is not None:
        return kv_token_bytes(read_model_config(Path(options.draft_model)), size)
    return 0


def draft_step_tokens(options: EngineOptions) -> int:
    """Most tokens of drafts in one step."""
    return 0 if options.drafts is None else (options.slots + 1) * options.draft_tokens


class DraftCounts:
    """A logger of statistics, as vLLM calls it after each step. Its factory is `made`."""

    def __init__(self) -> None:
        self.drafted, self.accepted = 0, 0

    def made(self, vllm_config: Any, engine_index: int = 0) -> DraftCounts:
        return self

    def record(self, scheduler_stats: Any, *others: Any, **named: Any) -> None:
        counts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if counts is not None:
            self.drafted += counts.num_draft_tokens
            self.accepted += counts.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *state: Any, **named: Any) -> None: ...

    def added(self, load: ReplicaLoad) -> ReplicaLoad:
        return replace(load, drafted_tokens=self.drafted, accepted_tokens=self.accepted)
