"""Versions of an adapter, given to an engine as versions of whole weights.

A relay holds the adapter alone. The weights that it belongs to lie in the model's files, mapped: they take
page cache, and no memory of the replica. Each pull makes the whole weights anew, tensor by tensor, where the
engine wants them. So every engine serves adapters, and none knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from millrace.adapters.low_rank import BASE, DOWN, MAGNITUDE, UP, adapted
from millrace.core.digest import (
    NamedBuffer,
    digest_buffers,
    kind_of,
    tensor_digest,
    version_digest,
)
from millrace.core.errors import WeightsError
from millrace.core.protocols import WeightsReader
from millrace.devices.weight_files import read_tensors

Tensor = torch.Tensor
Copy = Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None]


class Base:
    """The weights in `model_path` as the trainer has them frozen: rounded to `dtype`. Pickled, it is where
    they are. They are digested once; a file that is written after that is seen by its time and size."""

    def __init__(self, model_path: str, dtype: torch.dtype) -> None:
        self._path, self._dtype = model_path, dtype
        self._seen = self._files()

    def __reduce__(self) -> tuple[type[Base], tuple[str, torch.dtype]]:
        return Base, (self._path, self._dtype)

    @cached_property
    def _held(self) -> dict[str, Tensor]:
        tied = AutoConfig.from_pretrained(self._path).tie_word_embeddings
        found = dict(read_tensors(Path(self._path)))
        left_out = [name for name in found if name.endswith("rotary_emb.inv_freq")]
        for name in left_out + ["lm_head.weight"] * bool(tied):
            found.pop(name, None)
        return found

    def _files(self) -> list[tuple[str, int, int]]:
        told = ((path.name, path.stat()) for path in sorted(Path(self._path).glob("*.safetensors")))
        return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in told]

    @cached_property
    def digest(self) -> str:
        return digest_buffers(_as_buffer(name, self[name]) for name in sorted(self.names))

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def __getitem__(self, name: str) -> Tensor:
        return self._held[name].to(self._dtype)

    def refuse_another(self, told: Tensor) -> None:
        """`told`: the tensor `low_rank.BASE` of a version. Raises: WeightsError."""
        if self._files() != self._seen:
            raise WeightsError(
                f"the files in `model.path` ({self._path}) were written while the run reads them: put the "
                "weights back that it began with, and `--resume`"
            )
        expected = "".join(f"{int(digit):x}" for digit in told.tolist())
        if expected != self.digest:
            raise WeightsError(
                f"the published adapter belongs to weights with digest {expected}, and those in "
                f"`model.path` ({self._path}) have {self.digest} here.\n"
                "  Every host must have the very files that the trainer started from"
            )


class MergingReader:
    """A `WeightsReader` over one that reads adapters. The digests that it tells are of whole weights."""

    def __init__(
        self, reader: WeightsReader, base: Base, scale: float, told: dict[str, str] | None = None
    ) -> None:
        self._reader, self._base, self._scale = reader, base, scale
        self._told = {} if told is None else told

    def __reduce__(self) -> tuple[Any, ...]:
        return MergingReader, (self._reader, self._base, self._scale)

    def versions(self) -> list[int]:
        return self._reader.versions()

    def pin(self, register: Callable[[Any], Callable[[], None]]) -> None:
        """What an engine copies does not come from the slots."""

    def read(self, version: int, into: Sequence[NamedBuffer], copy: Copy | None = None) -> str:
        """See `WeightsReader.read`. A tensor is digested before it is copied: what comes after is told."""
        staged, adapter = self._adapter(version)
        kind, entries = kind_of(staged), list[tuple[str, str, tuple[int, ...], str]]()
        if {target.name for target in into} != set(self._base.names):
            other = sorted({target.name for target in into} ^ set(self._base.names))
            raise WeightsError(f"the engine and the model's files differ in the tensors {other[:4]}")
        for target in into:
            made = self._made(target.name, adapter)
            if (made.dtype, made.shape) != (target.dtype, tuple(target.shape)):
                raise WeightsError(f"`{made.name}` is {made.dtype} {made.shape}, not {target.shape}")
            entries.append((made.name, made.dtype, made.shape, tensor_digest(made.data, kind)))
            (copy or _copy)([made], [target])
        return self._tell(version_digest(entries, kind), staged)

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        """See `WeightsReader.view`. The whole weights are in memory for the time of the block."""
        staged, adapter = self._adapter(version)
        pieces = [self._made(name, adapter) for name in self._base.names]
        yield self._tell(digest_buffers(pieces, kind_of(staged)), staged), pieces

    def close(self) -> None:
        self._reader.close()

    def _tell(self, digest: str, staged: str) -> str:
        self._told[digest] = staged
        return digest

    def _adapter(self, version: int) -> tuple[str, dict[str, Tensor]]:
        """The digest that it was published under, and copies of its tensors."""
        with self._reader.view(version) as (staged, pieces):
            held = {piece.name: _as_tensor(piece) for piece in pieces}
        told = held.pop(BASE, None)
        if told is None:
            raise WeightsError(f"version {version} is no adapter, and `adapter.rank` says that it is one")
        self._base.refuse_another(told)
        layers = {f"{name.rpartition('.')[0]}.weight" for name in held}
        if unknown := sorted(layers - set(self._base.names)):
            raise WeightsError(f"version {version} adapts {unknown[:4]}, which the model does not have")
        return staged, held

    def _made(self, name: str, adapter: Mapping[str, Tensor]) -> NamedBuffer:
        weight, layer = self._base[name], name.removesuffix("weight")
        if name == layer or layer + DOWN not in adapter:
            return _as_buffer(name, weight)
        down, up, magnitude = (adapter.get(layer + kind) for kind in (DOWN, UP, MAGNITUDE))
        whole = adapted(weight.float(), down, up, magnitude, scale=self._scale)
        return _as_buffer(name, whole.to(weight.dtype))


class Merging:
    """What a replica makes of the readers that it opens. `scale`: how often an adapter's product counts."""

    def __init__(self, model_path: str, dtype: str, scale: float) -> None:
        self._base, self._scale = Base(model_path, getattr(torch, dtype)), scale
        self._published: dict[str, str] = {}

    def over(self, reader: WeightsReader) -> MergingReader:
        self._published.clear()
        return MergingReader(reader, self._base, self._scale, self._published)

    def published(self, digest: str) -> str:
        """The digest of the adapter that whole weights were made with. `digest`: theirs."""
        return self._published.get(digest, digest)


def _copy(held: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    for source, target in zip(held, into, strict=True):
        np.copyto(np.asarray(target.data).reshape(-1), source.data)


def _as_buffer(name: str, tensor: Tensor) -> NamedBuffer:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return NamedBuffer(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _as_tensor(piece: NamedBuffer) -> Tensor:
    """A copy in float32."""
    flat = torch.from_numpy(np.array(piece.data, copy=True)).view(getattr(torch, piece.dtype))
    return flat.view(piece.shape).float()
