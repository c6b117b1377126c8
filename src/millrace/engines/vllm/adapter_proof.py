"""Proof that vLLM computes with the adapter that was published, and with the base weights of its trainer.

The plain model reads the base weights from the model's files, and adds the product of the two thin matrices
to the output of each layer. So no whole matrix is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from millrace.adapters.low_rank import BASE
from millrace.adapters.served_weights import Base
from millrace.core.digest import NamedBuffer
from millrace.core.errors import WeightsError
from millrace.engines.vllm.adapter_slot import Factors, factors
from millrace.engines.vllm.loading import as_tensor
from millrace.engines.vllm.proof import Proof


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
