"""Damaged checkpoints, slots and model files: refused in words, or what was written. Never other weights."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from damage import damaged_bytes, damaged_tree, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from test_weights_ring import Host, model
from tests.runs import make_start
from trainer_doubles import make_batch, make_trainer, save_checkpoint, weights_of

from millrace.core.digest import NamedBuffer, digest_buffers
from millrace.core.errors import MillraceError
from millrace.core.turns.end_ids import end_ids
from millrace.engines.own.architecture import read_architecture
from millrace.trainer.files.checkpoint import load_checkpoint
from millrace.weights.layout import MANIFEST_BYTES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    trainer = make_trainer()
    trainer.step(make_batch(0), rejected_dir=root)
    return save_checkpoint(trainer, root), trainer, make_trainer()


@fuzzed
@given(st.data())
def test_a_damaged_checkpoint_is_refused_or_is_the_one_that_was_saved(saved, data):
    path, trainer, other = saved
    name = data.draw(st.sampled_from(["manifest.json"] * 3 + sorted(p.name for p in path.iterdir())))
    whole = (path / name).read_bytes()
    if name == "manifest.json" and data.draw(st.booleans()):
        changed = json.dumps(data.draw(damaged_tree(json.loads(whole)))).encode(errors="replace")
    else:
        changed = data.draw(damaged_bytes(whole))
    (path / name).write_bytes(changed)
    try:
        load_checkpoint(other, path)
    except MillraceError as error:
        assert str(path) in str(error)
    else:
        assert other.version == trainer.version
        assert all(torch.equal(a, b) for a, b in zip(weights_of(trainer), weights_of(other), strict=True))
    finally:
        (path / name).write_bytes(whole)


@pytest.fixture(scope="module")
def slot():
    host = Host()
    host.publish(1, model(1))
    yield host
    host.close()


@fuzzed
@given(st.data())
def test_a_damaged_manifest_in_a_slot_is_refused_or_gives_the_weights_that_were_published(slot, data):
    memory = slot.relay._memory
    index = next(i for i in range(memory.slots) if memory.complete(i))
    length = int(memory.records["manifest_bytes"][index])
    whole = bytes(memory.manifests[index][:length])
    if data.draw(st.booleans()):
        tree = data.draw(damaged_tree(msgspec.msgpack.decode(whole)))
        try:
            changed = msgspec.msgpack.encode(tree)
        except (OverflowError, UnicodeEncodeError):
            return
    else:
        changed = data.draw(damaged_bytes(whole))
    lied = data.draw(st.none() | st.integers(0, 2**64 - 1))
    memory.manifests[index][: len(changed)] = np.frombuffer(changed, np.uint8)
    memory.records["manifest_bytes"][index] = len(changed) if lied is None else lied
    into = [NamedBuffer(b.name, b.dtype, b.shape, np.zeros_like(b.data)) for b in model(1)]
    try:
        digest = slot.reader.read(1, into)
    except MillraceError as error:
        assert str(error)
    else:
        if digest == digest_buffers(into):
            assert all(np.array_equal(a.data, b.data) for a, b in zip(into, model(1), strict=True))
    finally:
        memory.manifests[index][:length] = np.frombuffer(whole, np.uint8)
        memory.records["manifest_bytes"][index] = length
        assert length < MANIFEST_BYTES


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make_start(root)
    return root / "start"


@fuzzed
@given(st.data())
def test_a_damaged_configuration_of_a_model_is_read_or_refused(start: Path, data):
    name = data.draw(st.sampled_from(["config.json", "generation_config.json"]))
    whole = (start / name).read_bytes()
    if data.draw(st.booleans()):
        changed = json.dumps(data.draw(damaged_tree(json.loads(whole)))).encode(errors="replace")
    else:
        changed = data.draw(damaged_bytes(whole))
    (start / name).write_bytes(changed)
    try:
        read_architecture(str(start))
        assert all(isinstance(token, int) for token in end_ids(str(start), None))
    except MillraceError as error:
        assert str(error)
    finally:
        (start / name).write_bytes(whole)
