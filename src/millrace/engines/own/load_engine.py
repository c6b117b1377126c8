"""Make an engine from a Hugging Face model directory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from millrace.core.errors import DataError, boundary
from millrace.core.turns.end_ids import end_ids
from millrace.engines.own.architecture import read_architecture
from millrace.engines.own.drafts.drafting_engine import DraftingEngine
from millrace.engines.own.drafts.trained_drafter import TrainedDraftingEngine
from millrace.engines.own.torch_engine import TorchEngine
from millrace.rollout.model_tokens import load_tokenizer, text_decoder
from millrace.rollout.protocol import EngineOptions


def open_engine(options: EngineOptions) -> TorchEngine:
    """An engine for the model in `options.model_path`. No weight file is read.

    Raises: DataError: the engine cannot run or read the model. ConfigError: there is no such device, or the
    device cannot compute exactly.
    """
    architecture = read_architecture(options.model_path)
    with _reading(options.model_path):
        tokenizer = load_tokenizer(options.model_path)
        eos_ids = end_ids(options.model_path, tokenizer)
    make = {None: TorchEngine, "trained": TrainedDraftingEngine}.get(options.drafts, DraftingEngine)
    return make(architecture, options, eos_ids=eos_ids, decode=text_decoder(tokenizer))


def load_engine(model_path: str, **options: Any) -> TorchEngine:
    """An engine that serves the directory's own weights as version 0. `options`: see `EngineOptions`. Outside
    a run no turn follows by default, and there is no replica that probes.

    Raises: as `open_engine`.
    """
    engine = open_engine(EngineOptions(model_path=model_path, **{"keep_kv": False, "probe": False} | options))
    with _reading(model_path):
        engine.load_standby(model_path)
    engine.swap(0)
    return engine


def _reading(model_path: str) -> AbstractContextManager[None]:
    return boundary("the engine", f"`model.path`: read the model in {model_path}", DataError)
