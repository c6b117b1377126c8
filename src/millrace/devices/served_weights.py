"""The tensors of a Hugging Face model directory, one after another, and versions of an adapter, given to an
engine as versions of whole weights.

A relay holds the adapter alone. The replica maps the base weights from the model's files: they take page
cache, and no memory of the replica. Each pull merges the adapter into the base weights, tensor by tensor, and
writes into the engine's memory. So every engine serves adapters, and no engine has code for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig

from millrace.core.digest import (
    NamedBuffer,
    digest_buffers,
    kind_of,
    tensor_digest,
    version_digest,
)
from millrace.core.errors import DataError, WeightsError
from millrace.core.protocols import WeightsReader
from millrace.core.supported import is_no_parameter
from millrace.devices.low_rank import BASE, DOWN, MAGNITUDE, UP, adapted
from millrace.placement.model_directory import indexed_files

Tensor = torch.Tensor
Copy = Callable[[Sequence[NamedBuffer], Sequence[NamedBuffer]], None]


class Base:
    """The base weights: those in `model_path`, rounded to `dtype` as the trainer's frozen weights are. A
    pickle has only the path. The weights are digested once; times and sizes show a file that is written after
    that."""

    def __init__(self, model_path: str, dtype: torch.dtype) -> None:
        self._path, self._dtype = model_path, dtype
        self._first_files = self._files()

    def __reduce__(self) -> tuple[type[Base], tuple[str, torch.dtype]]:
        return Base, (self._path, self._dtype)

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        tied = AutoConfig.from_pretrained(self._path).tie_word_embeddings
        tensors = dict(read_tensors(Path(self._path)))
        left_out = [name for name in tensors if is_no_parameter(name)]
        for name in left_out + ["lm_head.weight"] * bool(tied):
            tensors.pop(name, None)
        return tensors

    def _files(self) -> list[tuple[str, int, int]]:
        stats = ((path.name, path.stat()) for path in sorted(Path(self._path).glob("*.safetensors")))
        return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]

    @cached_property
    def digest(self) -> str:
        return digest_buffers(_as_buffer(name, self[name]) for name in sorted(self.names))

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtype)

    def refuse_another(self, base: Tensor) -> None:
        """`base`: the tensor `low_rank.BASE` of a version. Raises: WeightsError."""
        if self._files() != self._first_files:
            raise WeightsError(
                f"the files in `model.path` ({self._path}) were written while the run reads them: put the "
                "weights back that it began with, and `--resume`"
            )
        expected = "".join(f"{int(digit):x}" for digit in base.tolist())
        if expected != self.digest:
            raise WeightsError(
                f"the published adapter belongs to weights with digest {expected}, and those in "
                f"`model.path` ({self._path}) have {self.digest} here.\n"
                "  Every host must have the very files that the trainer started from"
            )


class MergingReader:
    """A `WeightsReader` of merged weights, over a reader of adapters. Its digests are of merged weights.

    `published`: gets the adapter's digest by the digest of the merged weights."""

    def __init__(
        self, reader: WeightsReader, base: Base, scale: float, published: dict[str, str] | None = None
    ) -> None:
        self._reader, self._base, self._scale = reader, base, scale
        self._published = {} if published is None else published

    def __reduce__(self) -> tuple[Any, ...]:
        return MergingReader, (self._reader, self._base, self._scale)

    def versions(self) -> list[int]:
        return self._reader.versions()

    def pin(self, register: Callable[[Any], Callable[[], None]]) -> None:
        """Nothing to do: an engine does not copy from the slots."""

    def read(self, version: int, into: Sequence[NamedBuffer], copy: Copy | None = None) -> str:
        """See `WeightsReader.read`. A tensor is digested before it is copied, so a later change is found."""
        staged, adapter = self._adapter(version)
        kind, entries = kind_of(staged), list[tuple[str, str, tuple[int, ...], str]]()
        if {target.name for target in into} != set(self._base.names):
            differing = sorted({target.name for target in into} ^ set(self._base.names))
            raise WeightsError(f"the engine and the model's files differ in the tensors {differing[:4]}")
        for target in into:
            merged = self._merged(target.name, adapter)
            if (merged.dtype, merged.shape) != (target.dtype, tuple(target.shape)):
                raise WeightsError(f"`{merged.name}` is {merged.dtype} {merged.shape}, not {target.shape}")
            entries.append((merged.name, merged.dtype, merged.shape, tensor_digest(merged.data, kind)))
            (copy or _copy)([merged], [target])
        return self._note(version_digest(entries, kind), staged)

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        """See `WeightsReader.view`. The merged weights are in memory while the block runs."""
        staged, adapter = self._adapter(version)
        buffers = [self._merged(name, adapter) for name in self._base.names]
        yield self._note(digest_buffers(buffers, kind_of(staged)), staged), buffers

    def close(self) -> None:
        self._reader.close()

    def _note(self, digest: str, staged: str) -> str:
        self._published[digest] = staged
        return digest

    def _adapter(self, version: int) -> tuple[str, dict[str, Tensor]]:
        """The digest that the adapter was published under, and copies of its tensors."""
        with self._reader.view(version) as (staged, buffers):
            tensors = {buffer.name: _as_tensor(buffer) for buffer in buffers}
        base = tensors.pop(BASE, None)
        if base is None:
            raise WeightsError(f"version {version} is no adapter, and `adapter.rank` says that it is one")
        self._base.refuse_another(base)
        layers = {f"{name.rpartition('.')[0]}.weight" for name in tensors}
        if unknown := sorted(layers - set(self._base.names)):
            raise WeightsError(f"version {version} adapts {unknown[:4]}, which the model does not have")
        return staged, tensors

    def _merged(self, name: str, adapter: Mapping[str, Tensor]) -> NamedBuffer:
        weight, layer = self._base[name], name.removesuffix("weight")
        if name == layer or layer + DOWN not in adapter:
            return _as_buffer(name, weight)
        down, up, magnitude = (adapter.get(layer + kind) for kind in (DOWN, UP, MAGNITUDE))
        merged = adapted(weight.float(), down, up, magnitude, scale=self._scale)
        return _as_buffer(name, merged.to(weight.dtype))


class Merging:
    """Wraps each reader that a replica opens in a `MergingReader`. `scale`: of `low_rank.adapted`."""

    def __init__(self, model_path: str, dtype: str, scale: float) -> None:
        self._base, self._scale = Base(model_path, getattr(torch, dtype)), scale
        self._published: dict[str, str] = {}

    def over(self, reader: WeightsReader) -> MergingReader:
        self._published.clear()
        return MergingReader(reader, self._base, self._scale, self._published)

    def published(self, digest: str) -> str:
        """The digest of the adapter in the merged weights that have `digest`."""
        return self._published.get(digest, digest)


def _copy(sources: Sequence[NamedBuffer], into: Sequence[NamedBuffer]) -> None:
    for source, target in zip(sources, into, strict=True):
        np.copyto(np.asarray(target.data).reshape(-1), source.data)


def _as_buffer(name: str, tensor: Tensor) -> NamedBuffer:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return NamedBuffer(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _as_tensor(buffer: NamedBuffer) -> Tensor:
    """A copy in float32."""
    flat = torch.from_numpy(np.array(buffer.data, copy=True)).view(getattr(torch, buffer.dtype))
    return flat.view(buffer.shape).float()


# ---------------------------------------------------------------- weight files


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, mapped from the files. Raises: DataError: the directory has no weight file."""
    for path in _weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def _weight_files(directory: Path) -> Iterable[Path]:
    if indexed := indexed_files(directory):
        return indexed
    if (single := directory / "model.safetensors").exists():
        return [single]
    raise DataError(f"{directory} has neither model.safetensors nor model.safetensors.index.json")
