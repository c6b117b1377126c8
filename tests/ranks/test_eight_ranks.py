"""A whole node of eight ranks: gradients, checkpoints, publications, and half of the ranks go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from tests.long import long
from tests.ranks import publishing, saving, work
from tests.ranks.together import together
from trainer_doubles import save_tiny_model

from millrace.core.digest import digest_buffers
from millrace.weights.relay import RelayWorker
from millrace.weights.ring import open_reader

SHAPES = [{"shard": 8}, {"shard": 4, "tensor": 2}, {"shard": 4, "sequence": 2}]
DIVISIBLE = {"vocab_size": 67, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Embeddings tied, and not tied."""
    directory = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(directory / family, family, **DIVISIBLE) for family in ("qwen3", "llama")}


def digests(checkpoint: Path) -> dict[str, str]:
    """Of weights and optimizer. Generators are those of each rank."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: file["digest"] for name, file in files.items() if not name.startswith("rng")}


@long
def test_eight_ranks_give_the_gradient_of_one_process(paths: dict[str, Path]) -> None:
    errors = together(8, work.gradient_errors, SHAPES, paths)[0]
    assert len(errors) == len(SHAPES) * len(paths)
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


@long
def test_four_ranks_go_on_from_the_checkpoint_of_eight(paths: dict[str, Path], tmp_path: Path) -> None:
    shape, path = {"shard": 4, "tensor": 2}, paths["llama"]
    assert together(8, saving.save_and_go_on, shape, path, tmp_path) == [True] * 8
    saved = tmp_path / "v00000002"
    halves = [{"shard": 4}, {"shard": 2, "sequence": 2}]
    together(4, saving.load_and_save_again, halves, path, saved)
    for number in range(len(halves)):
        assert digests(tmp_path / str(number) / saved.name) == digests(saved)


@long
def test_eight_ranks_publish_the_bytes_of_one_process(paths: dict[str, Path], tmp_path: Path) -> None:
    """Untrained, and after a step of the ranks: one process that loads their checkpoint has the same bytes. A
    step of one process may have other last bits, because its sums are taken in another order."""
    cases = list(zip(paths.values(), SHAPES, strict=False))
    weights_bytes = [publishing.weights_bytes(path) for path, _ in cases]
    relay = RelayWorker("relay", 2 * len(cases))
    endpoint = asyncio.run(relay.open(max(weights_bytes)))
    digests = together(8, publishing.publish, cases, endpoint, tmp_path)
    assert all(each == digests[0] for each in digests) and len(set(digests[0])) == 2 * len(cases)
    reader = open_reader(endpoint)
    for version, digest in enumerate(digests[0]):
        checkpoint = publishing.checkpoint_in(tmp_path / str(version)) if version % 2 else None
        due = publishing.of_one_process(cases[version // 2][0], checkpoint)
        found = {name: torch.zeros_like(weight) for name, weight in due.items()}
        staged = asyncio.run(relay.stage(version, digest)).digest
        assert reader.read(version, publishing.as_buffers(found)) == staged
        assert digest_buffers(publishing.as_buffers(due)) == staged
        assert [name for name in due if not torch.equal(found[name], due[name])] == []
    reader.close()
