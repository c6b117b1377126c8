"""A version is written once, found by every replica that needs it, and removed when none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from millrace.core.digest import NamedBuffer
from millrace.core.errors import TornVersionError, UnknownVersionError, WeightsError
from millrace.engines.server.server_engine import Handover, write_safetensors


class Reader:
    """Of a made-up relay, staged under "d". `torn`: what is read is overwritten meanwhile."""

    def __init__(self, *pieces: NamedBuffer, torn: bool = False) -> None:
        self._pieces, self._torn, self.views = list(pieces), torn, 0

    @contextmanager
    def view(self, version: int) -> Iterator[tuple[str, list[NamedBuffer]]]:
        self.views += 1
        yield "d", self._pieces
        if self._torn:
            raise TornVersionError(f"version {version}")


def piece(name: str, value: float = 1.0) -> NamedBuffer:
    return NamedBuffer(name, "float32", (2, 3), memoryview(np.full((2, 3), value, np.float32)).cast("B"))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("v*"))


def test_the_file_holds_names_formats_shapes_and_numbers(tmp_path: Path) -> None:
    half = torch.arange(5, dtype=torch.bfloat16)
    data = memoryview(half.view(torch.uint8).numpy())
    pieces = [
        piece("a", 2.5),
        NamedBuffer("b.weight", "bfloat16", (5,), data),
    ]
    write_safetensors(tmp_path / "x.safetensors", pieces)
    found = load_file(tmp_path / "x.safetensors")
    assert found["a"].shape == (2, 3) and found["a"].unique().tolist() == [2.5]
    assert torch.equal(found["b.weight"], half)


def test_two_replicas_share_one_file(tmp_path: Path) -> None:
    reader = Reader(piece("a"))
    places = {Handover(tmp_path, with_head=False).hold(1, "d", reader) for _ in range(2)}
    assert len(places) == 1 and reader.views == 1


def test_older_versions_go_when_nobody_needs_them(tmp_path: Path) -> None:
    reader, slow, quick = Reader(piece("a")), *(Handover(tmp_path, with_head=False) for _ in range(2))
    old = slow.hold(1, "d", reader)
    for version in (2, 3):
        new = quick.hold(version, "d", reader)
    assert names(tmp_path) == [old.name, new.name]
    slow.close()
    newest = quick.hold(4, "d", reader)
    assert names(tmp_path) == [newest.name]


def test_a_removal_that_was_cut_off_is_no_obstacle(tmp_path: Path) -> None:
    handover, reader = Handover(tmp_path, with_head=False), Reader(piece("a"))
    handover.hold(1, "d", reader)
    (tmp_path / "v00000000-d").mkdir()
    assert names(tmp_path) == ["v00000000-d", "v00000001-d"]
    assert names(handover.hold(2, "d", reader).parent) == ["v00000002-d"]


def test_a_version_that_was_staged_anew_is_not_handed_over(tmp_path: Path) -> None:
    with pytest.raises(UnknownVersionError, match="staged anew"):
        Handover(tmp_path, with_head=False).hold(1, "of the first", Reader(piece("a")))
    assert names(tmp_path) == []


def test_what_is_torn_is_never_found(tmp_path: Path) -> None:
    handover = Handover(tmp_path, with_head=False)
    with pytest.raises(TornVersionError):
        handover.hold(1, "d", Reader(piece("a"), torn=True))
    assert names(tmp_path) == []
    assert load_file(handover.hold(1, "d", Reader(piece("b"))) / "model.safetensors").keys() == {"b"}


def test_a_head_of_its_own_is_the_embedding(tmp_path: Path) -> None:
    handover, embedding = Handover(tmp_path, with_head=True), piece("model.embed_tokens.weight", 3.0)
    found = load_file(handover.hold(1, "d", Reader(embedding)) / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    found = load_file(
        handover.hold(2, "d", Reader(embedding, piece("lm_head.weight", 4.0))) / "model.safetensors"
    )
    assert found["lm_head.weight"].unique().tolist() == [4.0]
    with pytest.raises(WeightsError, match=r"0 of them are called \*embed_tokens\.weight"):
        handover.hold(3, "d", Reader(piece("a")))
