"""Open vLLM as an engine: the settings of its process and of the engine."""

from __future__ import annotations

import os
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from millrace.core.digest import NamedBuffer
from millrace.core.errors import ConfigError, RemoteError, WeightsError, boundary
from millrace.devices.device import computes, computing_dtype, torch_device
from millrace.devices.low_rank import BASE
from millrace.devices.served_weights import Base
from millrace.engines.vllm.async_engine import AsyncVllmEngine, Frontend
from millrace.engines.vllm.extension import MillraceWorker, repair_sampler
from millrace.engines.vllm.loading import Factors, as_tensor, factors, load_base, slot_arguments
from millrace.engines.vllm.mode import VllmEngine, VllmMode
from millrace.engines.vllm.processes.rank_end import RankEnd
from millrace.engines.vllm.processes.vllm_sockets import unnamed_sockets
from millrace.engines.vllm.proof import Proof
from millrace.engines.vllm.vllm_arguments import (
    DraftCounts,
    draft_arguments,
    draft_cache_bytes,
    draft_step_tokens,
)
from millrace.engines.vllm.vllm_versions import installed, refuse_missing_package
from millrace.placement.memory.model_shape import kv_token_bytes
from millrace.placement.model_directory import read_model_config
from millrace.rollout.intake import Intake
from millrace.rollout.model_tokens import open_intake
from millrace.rollout.protocol import EngineOptions, NativeAdapter

# Without multiprocessing `LLMEngine` runs in the replica's process. `AsyncLLM` never does, and on a CPU it
# computes in its own process then, instead of in one more. Processes are spawned: a fork would inherit the
# replica's sockets, and locks that its threads hold.
_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # no other host reaches the process
}
_ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}
Beside = tuple[Base, NativeAdapter] | None
"""What vLLM computes adapters beside. None: versions are whole weights."""
_RANK_EXECUTOR = "millrace.engines.vllm.processes.ranks.RankExecutor"
# A scale for each row of a matrix, and for each token that it multiplies.
_SCHEMES = {"fp8": "fp8_per_channel"}
_BLOCK_TOKENS = 32  # of vLLM's cache, the fewest on a CPU. Prompts share whole blocks


def open_engine(options: EngineOptions) -> VllmMode:
    """vLLM as an engine for the model in `options.model_path`.

    Raises: ConfigError: this Python has no supported vLLM, or vLLM cannot run the model on this device. With
    processes of vLLM RemoteError: only the log tells whether one refused or was killed."""
    with boundary("vLLM", "cannot be had: see `rollout.python`", ConfigError):
        release = installed(_untried(options))
        refuse_missing_package(options.drafts)
    here = options.stepwise and options.tensor == 1
    # Each rank opens its own device. If this process opened a device, it would take memory of the first rank.
    device = torch_device(options.device) if here else torch.device(options.device)
    published: torch.dtype = getattr(torch, options.dtype)
    quantised = options.quantization is not None
    computing = published if quantised else computing_dtype(published, device)
    os.environ.update(_PROCESS | (_ON_CPU if device.type == "cpu" else {}))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    adapter, base = options.native_adapter, Base(options.model_path, published)
    tokens = {"tokens_max": options.max_sequence_tokens - 1}
    proof = Proof(options.model_path, published, quantised=quantised, **tokens)
    if adapter is not None:
        proof = AdapterProof(options.model_path, published, base=base, scale=adapter.scale, **tokens)
    intake = open_intake(options)
    kind = ConfigError if here else RemoteError
    drafting = draft_arguments(options)
    mode = _mode(options)
    _let_vllm_look_at_llvmlite()
    with boundary("vLLM", f"cannot serve {options.model_path}", kind), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM warns of its own settings
        arguments = {**_arguments(options, computing), **_memory(options, computing, device), **drafting}
        settings = {
            "slots": options.slots,
            "recompute": options.recompute,
            "seeded": options.seeded,
            "computes": f"{computes(published, computing)}{_rounding(options)}; vLLM {release}, {mode}",
            "native": adapter is not None,
            "drafts": DraftCounts() if drafting else None,
        }
        beside = None if adapter is None else (base, adapter)
        open_mode = _stepwise if options.stepwise else _asynchronous
        with unnamed_sockets():
            engine = open_mode(arguments, beside, intake, proof, settings)
            engine.logprobs()  # a model that vLLM cannot compute raises an error now, before any version
    return engine


def _let_vllm_look_at_llvmlite() -> None:
    """After n-gram drafts, which load numba, no second engine would open in this process. vLLM reads the
    `__dict__` of each object in each module, and llvmlite's library answers with a function of this name."""
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        ffi.lib._fntab["__dict__"] = {}


def _stepwise(
    arguments: dict[str, Any], beside: Beside, intake: Intake, proof: Proof, settings: dict[str, Any]
) -> VllmMode:
    from vllm import EngineArgs, LLMEngine

    rank_end = RankEnd()
    loggers = _loggers(settings)
    llm = LLMEngine.from_engine_args(EngineArgs(**arguments, async_scheduling=False), stat_loggers=loggers)
    if loggers:
        _raise_first(llm.collective_rpc(repair_sampler))
    if beside is not None:
        _raise_first(llm.collective_rpc(load_base, args=beside))
    return VllmEngine(llm, rank_end, intake, proof, **settings)


def _asynchronous(
    arguments: dict[str, Any], beside: Beside, intake: Intake, proof: Proof, settings: dict[str, Any]
) -> VllmMode:
    """vLLM schedules asynchronously by default where it can. On a CPU it never does."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    extension = f"{MillraceWorker.__module__}.{MillraceWorker.__qualname__}"
    parameters = AsyncEngineArgs(**arguments, worker_extension_cls=extension)
    loggers = _loggers(settings)
    frontend = Frontend(lambda: AsyncLLM.from_engine_args(parameters, stat_loggers=loggers), RankEnd())
    if loggers:
        frontend.repair_sampler()
    if beside is not None:
        _raise_first(frontend.load_base(*beside))
    return AsyncVllmEngine(frontend, intake, proof, **settings)


def _loggers(settings: dict[str, Any]) -> list[Any] | None:
    """Of vLLM's statistics. None: it has none."""
    drafts: DraftCounts | None = settings["drafts"]
    return None if drafts is None else [drafts.made]


def _raise_first(errors: Sequence[Sequence[Exception]]) -> None:
    """`errors` of each rank."""
    for error in (error for of_rank in errors for error in of_rank):
        raise error


def _untried(options: EngineOptions) -> str:
    """The key that not every supported release was tried with. Empty: none is set."""
    if options.drafts is not None:
        return "rollout.drafts"
    if options.native_adapter is not None:
        return "rollout.native_adapters"
    return "" if options.quantization is None else "rollout.quantization"


def _rounding(options: EngineOptions) -> str:
    """The quantisation, for people."""
    return ", matrices in fp8 (weights by channel, inputs by token)" if options.quantization else ""


def _mode(options: EngineOptions) -> str:
    """The mode, for people."""
    mode = "one step at a time" if options.stepwise else "asynchronous"
    beside = "" if options.native_adapter is None else ", adapters beside the weights"
    drafts = "" if options.drafts is None else f", {options.drafts} drafts"
    noise = "" if options.seeded else "; without seeds a resumed trajectory samples anew"
    return f"{mode}{beside}{drafts}, not exact{noise}"


def _arguments(options: EngineOptions, computing: torch.dtype) -> dict[str, Any]:
    """Arguments for the slots and one more request, the proof's."""
    return {
        "model": options.model_path,
        "runner": "generate",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # none of the model's own sampling
        "load_format": "dummy",
        "dtype": str(computing).removeprefix("torch."),
        "quantization": None if options.quantization is None else _SCHEMES[options.quantization],
        "seed": 0 if options.seeded else secrets.randbits(31),  # no two replicas share their noise
        "tensor_parallel_size": options.tensor,
        "distributed_executor_backend": "uni" if options.tensor == 1 else _RANK_EXECUTOR,
        "max_model_len": options.max_sequence_tokens,
        "max_num_seqs": options.slots + 1,
        "max_num_batched_tokens": options.prefill_chunk + options.slots + 1 + draft_step_tokens(options),
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        **({} if options.native_adapter is None else slot_arguments(options.native_adapter)),
    }


def _memory(options: EngineOptions, computing: torch.dtype, device: torch.device) -> dict[str, Any]:
    """On a CPU, memory for every slot and one more; on a GPU the replica's share, which it may lend.

    On a CPU prompts are prefilled in one step: a seeded request that is prefilled in several steps fails
    there (`Generator.get_offset`).
    """
    if device.type != "cpu":
        share = min(options.device_share, 0.95)
        return {"gpu_memory_utilization": share, "enable_sleep_mode": options.colocated}
    blocks = (options.slots + 1) * -(-options.max_sequence_tokens // _BLOCK_TOKENS) + 1
    model = read_model_config(Path(options.model_path))
    token_bytes = kv_token_bytes(model, computing.itemsize, options.tensor)  # of each rank
    token_bytes += draft_cache_bytes(options, computing.itemsize)
    tokens = max(options.prefill_chunk, options.max_sequence_tokens) + options.slots + 1
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": tokens + draft_step_tokens(options),
        "block_size": _BLOCK_TOKENS,
        "kv_cache_memory_bytes": blocks * _BLOCK_TOKENS * token_bytes,
    }


class AdapterProof(Proof):
    """A proof for versions that are adapters of `base`. `scale`: of `low_rank.adapted`."""

    def __init__(self, *arguments: Any, base: Base, scale: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._base, self._scale = base, scale

    def expected(self, buffers: Sequence[NamedBuffer]) -> torch.Tensor:
        """See `Proof`. Raises: WeightsError: the version is no adapter of the base weights."""
        tensors = {buffer.name: as_tensor(buffer) for buffer in buffers}
        if BASE not in tensors:
            raise WeightsError("the version is no adapter, and `rollout.native_adapters` says that it is one")
        self._base.refuse_another(tensors[BASE])
        weights = {name: self._base[name] for name in self._base.names}
        with self._adding(factors(tensors, torch.float32)):
            return self.logprobs(weights)

    @contextmanager
    def _adding(self, layers: Mapping[str, Factors]) -> Iterator[None]:
        """Inside the block the plain model computes with the adapter."""
        with ExitStack() as hooks:
            for name, (down, up) in layers.items():
                adding = _product(down, self._scale * up)
                hooks.callback(self._model.get_submodule(name).register_forward_hook(adding).remove)
            yield


def _product(down_RI: torch.Tensor, up_OR: torch.Tensor) -> Callable[..., torch.Tensor]:
    def add(_layer: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + (inputs[0].float() @ down_RI.T @ up_OR.T).to(output.dtype)

    return add
