"""The kinds of engines: the function that opens each, and its capabilities. Names no torch.

A new engine is a row of `ENGINES`. docs/architecture.md lists what else it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millrace.config.objects import find_object
from millrace.core.errors import ConfigError
from millrace.core.supported import SERVER, TORCH_ENGINE, VLLM, VLLM_QUANTISED
from millrace.core.types import Sampling
from millrace.placement.memory import engine_memory
from millrace.rollout.protocol import Capabilities, Engine, EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from millrace.config.schema import Config
    from millrace.config.tables.section import Section
    from millrace.placement.memory.engine_memory import MemoryNeed, ServedModel


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

SERVERS = {
    "vLLM": Capabilities(
        frozenset({
            "rollout.seeded", "sampling.top_p", "sampling.top_k", "sampling.min_p",
            "sampling.repetition_penalty", "sampling.stop", "sampling.stop_token_ids",
            "sampling.ignore_eos", "sampling.allowed_token_ids",
        }),
        shares_prefixes=False,  # the server may share them, and does not say so
        chunks_prompts=False,  # on a GPU it does
        models=SERVER,
        temperature_max=2.0,
    ),
    "SGLang": Capabilities(
        frozenset({
            "rollout.seeded", "sampling.stop", "sampling.stop_token_ids", "sampling.ignore_eos",
        }),
        shares_prefixes=False,
        chunks_prompts=False,
        models=SERVER,
        temperature_max=2.0,
    ),
}  # fmt: skip
"""The capabilities of servers, by their program. They are known when a server answers: until then a run may
have what any of them can do."""

CUTS = frozenset({"top_p", "top_k", "min_p"})
"""Settings of `sampling` that leave some tokens out."""

ENGINES = {
    "own": EngineKind(
        "millrace.engines.own.load_engine:open_engine",
        Capabilities(
            frozenset({
                "rollout.exact", "rollout.recompute", "rollout.colocated", "rollout.drafts",
                *(f"sampling.{name}" for name in SAMPLING),
            }),
            shares_prefixes=True,
            chunks_prompts=True,
            drafts=frozenset({"earlier", "trained"}),
            models=TORCH_ENGINE,
        ),
        engine_memory.own_engine,
    ),
    "vllm": EngineKind(
        "millrace.engines.vllm.start:open_engine",
        Capabilities(
            frozenset({
                "rollout.recompute", "rollout.seeded", "rollout.stepwise", "rollout.tensor",
                "rollout.colocated", "rollout.native_adapters", "rollout.quantization", "rollout.drafts",
                "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.repetition_penalty",
                "sampling.stop", "sampling.stop_token_ids", "sampling.ignore_eos",
                "sampling.allowed_token_ids", "sampling.logprobs",
            }),
            shares_prefixes=True,
            chunks_prompts=False,  # on a GPU it does
            drafts=frozenset({"ngram", "suffix", "mtp", "eagle"}),
            models=VLLM,
            quantised=VLLM_QUANTISED,
            temperature_max=2.0,
        ),
        engine_memory.vllm,
        spawn_s_max=900.0,  # on a GPU it compiles first
    ),
    "server": EngineKind(
        "millrace.engines.server.connect:open_engine",
        SERVERS["vLLM"],
        engine_memory.server,
    ),
}  # fmt: skip

# Keys of `rollout` that depend on the engine.
_ROLLOUT = (
    "exact", "recompute", "seeded", "stepwise", "tensor", "colocated", "native_adapters", "quantization",
    "drafts",
)  # fmt: skip
# Keys that every engine understands.
_UNIVERSAL = {"sampling.max_tokens", "sampling.temperature"}


def open_engine(name: str, options: EngineOptions) -> Engine:
    """An engine of the kind `name`. Raises: ConfigError, DataError: this machine cannot open the engine, or
    the engine cannot run the model."""
    opened: Engine = find_object(ENGINES[name].opener, f"the engine {name!r}")[0](options)
    return opened


def knows_token_masks(config: Config) -> bool:
    """Whether the trainer knows which tokens `CUTS` leave."""
    able = "sampling.token_masks" in ENGINES[config.rollout.engine].can.settings
    return able and config.sampling.token_masks


def cut_sampling(config: Config) -> Iterator[str]:
    """The trainer gives probability to tokens that the engine never samples, so sampled tokens seem less
    likely than they were. Token masks of the engine prevent this."""
    sampling, engine = config.sampling, config.rollout.engine
    named = [f"`sampling.{key}` ({value})" for key, value in sorted(_changed(sampling)) if key in CUTS]
    if not named or knows_token_masks(config):
        return
    reason, remedy = (
        f'`rollout.engine` ("{engine}") does not record which',
        '`rollout.engine` to "own"',
    )
    if not sampling.token_masks:
        reason, remedy = "`sampling.token_masks` is false", "`sampling.token_masks` to true"
    yield (
        f"{' and '.join(named)}: the engine samples from some of the tokens, and the trainer counts all: "
        f"{reason}. So their ratio is not 1, even on-policy (docs/models.md).\n"
        f"  Set {remedy}, or `top_p` to 1, `top_k` and `min_p` to 0"
    )


def refuse_unable(config: Config, program: str | None = None) -> None:
    """Raises: ConfigError, which names each setting that `rollout.engine` does not know. `program`: of a
    server that has answered."""
    settings = {f"rollout.{key}": value for key, value in _changed(config.rollout) if key in _ROLLOUT}
    settings |= {f"sampling.{key}": value for key, value in _changed(config.sampling)}
    name, can = f"`rollout.engine` ({config.rollout.engine})", ENGINES[config.rollout.engine].can
    if program is not None:
        name, can = f"A server of `rollout.servers` ({program})", SERVERS[program]
    _refuse_hotter(name, can, config.sampling.temperature)
    unable = [key for key in settings if key not in can.settings | _UNIVERSAL]
    if unable:
        raise ConfigError(
            f"{name} cannot do "
            + ", ".join(f"`{key}` ({settings[key]})" for key in unable)
            + ".\n  Leave it at its default, or choose another engine"
        )
    if (drafts := config.rollout.drafts) is not None and drafts not in can.drafts:
        raise ConfigError(
            f"{name} cannot make drafts of the kind {drafts!r}: `rollout.drafts` is one of "
            f"{sorted(can.drafts)}"
        )
    if config.rollout.engine == "vllm":
        refuse_beside_drafts(config)
    if config.rollout.quantization is not None and config.model.dtype != "bfloat16":
        raise ConfigError(
            f"`rollout.quantization` ({config.rollout.quantization}) rounds weights that are published in "
            f"bfloat16, and `model.dtype` is {config.model.dtype}.\n"
            '  Set `model.dtype` to "bfloat16", or leave `rollout.quantization` out'
        )


def _refuse_hotter(name: str, can: Capabilities, temperature: float) -> None:
    if temperature > can.temperature_max:
        raise ConfigError(
            f"{name} samples at temperatures up to {can.temperature_max:g}, and "
            f"`sampling.temperature` is {temperature:g}.\n  Lower it, or choose another engine"
        )


def _changed(section: Section) -> list[tuple[str, object]]:
    """Keys that are not at their default, with their values."""
    fields = type(section).model_fields
    return [(key, value) for key, value in section if value != fields[key].default]


HAVE_WEIGHTS = ("mtp", "eagle")
"""Sources that compute drafts with weights of their own."""


def refuse_beside_drafts(config: Config) -> None:
    """Raises: ConfigError, which names every setting that does not go with `rollout.drafts` in vLLM."""
    rollout, drafts = config.rollout, config.rollout.drafts
    if drafts is None:
        return
    reasons = []
    if config.sampling.min_p > 0:
        reasons.append("`sampling.min_p`: vLLM refuses each such request")
    if rollout.seeded:
        reasons.append(
            "`rollout.seeded`: what is drafted decides how much noise a token takes, so seeds would repeat "
            "nothing. Set it to false"
        )
    untried = {"tensor": rollout.tensor > 1, "quantization": rollout.quantization is not None}
    untried |= {"native_adapters": rollout.native_adapters}
    reasons += [f"`rollout.{key}`: nobody has tried both" for key, is_set in untried.items() if is_set]
    if drafts in HAVE_WEIGHTS and rollout.colocated:
        reasons.append("`rollout.colocated`: weights of drafts would not come back after a sleep")
    if drafts == "eagle" and rollout.draft_model is None:
        reasons.append("no `rollout.draft_model`: set it to the directory of an EAGLE head of the model")
    if drafts == "suffix" and rollout.draft_rows_max < rollout.slots:
        reasons.append(
            f"`rollout.draft_rows_max` ({rollout.draft_rows_max}): vLLM makes suffix drafts for any number "
            f"of rows. Set it to `rollout.slots` ({rollout.slots})"
        )
    if reasons:
        raise ConfigError(f"`rollout.drafts` ({drafts}) in vLLM does not go with\n  " + "\n  ".join(reasons))
