"""The kinds of engines: the function that opens each, and its capabilities. Names no torch.

A new engine is a row of `ENGINES`. docs/extending.md lists what else it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millrace.core.errors import ConfigError
from millrace.core.objects import find_object
from millrace.core.supported import TORCH_ENGINE, VLLM
from millrace.core.types import Sampling
from millrace.placement import engine_memory
from millrace.rollout.protocol import Capabilities, Engine, EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from millrace.config.schema import Config
    from millrace.config.tables.section import Section
    from millrace.placement.engine_memory import MemoryNeed, ServedModel


class EngineKind(NamedTuple):
    """`opener`: "package.module:function". The function takes `EngineOptions` and opens an engine without
    weights. `memory`: of a replica with this engine. `spawn_s_max`: a replica may take this long to start,
    even if `supervision.spawn_timeout_s` is less.
    """

    opener: str
    can: Capabilities
    memory: Callable[[ServedModel], MemoryNeed]
    spawn_s_max: float = 0.0


SAMPLING = Sampling.__struct_fields__
"""Every key of section `sampling`."""

ENGINES = {
    "own": EngineKind(
        "millrace.engines.own.load:open_engine",
        Capabilities(
            frozenset({
                "rollout.exact", "rollout.recompute", "rollout.colocated",
                *(f"sampling.{name}" for name in SAMPLING),
            }),
            shares_prefixes=True,
            chunks_prompts=True,
            models=TORCH_ENGINE,
        ),
        engine_memory.own_engine,
    ),
    "vllm": EngineKind(
        "millrace.engines.vllm.start:open_engine",
        Capabilities(
            frozenset({
                "rollout.recompute", "rollout.seeded", "rollout.stepwise", "rollout.tensor",
                "rollout.colocated", "sampling.top_p", "sampling.top_k", "sampling.min_p",
                "sampling.repetition_penalty", "sampling.stop", "sampling.stop_token_ids",
                "sampling.ignore_eos", "sampling.allowed_token_ids", "sampling.logprobs",
            }),
            shares_prefixes=True,
            chunks_prompts=False,  # on a GPU it does
            models=VLLM,
            temperature_max=2.0,
        ),
        engine_memory.vllm,
        spawn_s_max=900.0,  # on a GPU it compiles first
    ),
    "server": EngineKind(
        "millrace.engines.server.connect:open_engine",
        Capabilities(
            frozenset({
                "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.repetition_penalty",
                "sampling.stop", "sampling.stop_token_ids", "sampling.ignore_eos",
                "sampling.allowed_token_ids",
            }),
            shares_prefixes=False,  # the server may share them, and does not say so
            chunks_prompts=False,  # on a GPU it does
            models=VLLM,
            temperature_max=2.0,
        ),
        engine_memory.server,
    ),
}  # fmt: skip

# Keys of `rollout` that depend on the engine.
_ROLLOUT = ("exact", "recompute", "seeded", "stepwise", "tensor", "colocated")
# Keys that every engine understands.
_UNIVERSAL = {"sampling.max_tokens", "sampling.temperature"}


def open_engine(name: str, options: EngineOptions) -> Engine:
    """An engine of the kind `name`. Raises: ConfigError, DataError: this machine cannot open the engine, or
    the engine cannot run the model."""
    opened: Engine = find_object(ENGINES[name].opener, f"the engine {name!r}")[0](options)
    return opened


def refuse_unable(config: Config) -> None:
    """Raises: ConfigError, which names each setting that `rollout.engine` does not know."""
    rollout = {key: value for key, value in _changed(config.rollout) if key in _ROLLOUT}
    settings = {f"rollout.{key}": value for key, value in rollout.items()}
    settings |= {f"sampling.{key}": value for key, value in _changed(config.sampling)}
    name = config.rollout.engine
    _refuse_hotter(name, config.sampling.temperature)
    unable = [key for key in settings if key not in ENGINES[name].can.settings | _UNIVERSAL]
    if unable:
        raise ConfigError(
            f"`rollout.engine` ({name}) cannot do "
            + ", ".join(f"`{key}` ({settings[key]})" for key in unable)
            + ".\n  Leave it at its default, or choose another engine"
        )


def _refuse_hotter(name: str, temperature: float) -> None:
    hottest = ENGINES[name].can.temperature_max
    if temperature > hottest:
        raise ConfigError(
            f"`rollout.engine` ({name}) samples at temperatures up to {hottest:g}, and "
            f"`sampling.temperature` is {temperature:g}.\n  Lower it, or choose another engine"
        )


def _changed(section: Section) -> list[tuple[str, object]]:
    """Keys that are not at their default, with their values."""
    fields = type(section).model_fields
    return [(key, value) for key, value in section if value != fields[key].default]
