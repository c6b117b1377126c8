"""Properties of every parser and codec: what is written is read, and rubbish is an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.config.load import load_as, parse_value, read_overrides
from millrace.config.schema import Config
from millrace.config.toml_text import as_toml
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.digest import NamedBuffer, TensorSpec
from millrace.core.errors import ConfigError, DataError, LedgerError, WeightsError
from millrace.ledger.codec import (
    pack_plain,
    pack_prompt,
    pack_squeezed,
    pack_versions,
    unpack_columns,
    unpack_prompt,
    version_runs,
)
from millrace.observe.sinks.jsonl import read_events
from millrace.runtime.local.framing import WRITE_BYTES, Framing, Kind
from millrace.weights.manifest import make_manifest

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


# ---------------------------------------------------------------- configuration


@given(VALUES)
def test_a_value_written_as_toml_is_read_back_equal(value):
    assert tomllib.loads(f"value = {as_toml(value)}")["value"] == value


@given(VALUES)
def test_a_value_on_the_command_line_is_read_as_toml(value):
    assert parse_value(as_toml(value)) == value


@given(TEXT)
def test_any_override_is_read_or_refused_as_a_configuration_error(text):
    with contextlib.suppress(ConfigError):
        read_overrides(Config, [text], Path("/"))


@given(key=st.sampled_from(["steps", "model", "schedule.kind", "task.options", "x", "a.b.c"]), value=VALUES)
def test_any_value_of_any_key_loads_or_is_a_configuration_error(key, value, tmp_path_factory):
    empty = tmp_path_factory.getbasetemp() / "empty.toml"
    empty.touch()
    with contextlib.suppress(ConfigError):
        load_as(Config, empty, [f"{key}={as_toml(value)}"])


@given(data=st.binary(max_size=200))
def test_any_file_loads_or_is_a_configuration_error(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        load_as(Config, path)


# ---------------------------------------------------------------- ledger

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=60)
LOGPROB = st.floats(max_value=0.0, allow_nan=False)


@given(TOKENS, st.data(), st.booleans())
def test_tokens_log_probs_and_versions_come_back_bit_for_bit(tokens, data, squeeze):
    several = {"min_size": len(tokens), "max_size": len(tokens)}
    logprobs = data.draw(st.lists(LOGPROB, **several))
    columns = TokenColumns.of(tokens, logprobs, data.draw(st.lists(st.integers(0, 3), **several)))
    packed = (pack_squeezed if squeeze else pack_plain)(columns)
    assert unpack_columns(packed, pack_versions(columns.runs)) == columns


@given(TOKENS)
def test_a_prompt_comes_back(tokens):
    assert unpack_prompt(pack_prompt(token_array(tokens))).tolist() == tokens


@given(st.binary(max_size=100), st.binary(max_size=10), st.sampled_from([b"", b"p", b"z"]))
def test_bytes_that_nobody_packed_are_a_ledger_error_or_tokens(blob, versions, mark):
    with contextlib.suppress(LedgerError):
        assert len(unpack_columns(mark + blob, versions)) == sum(n for _, n in version_runs(versions))
    with contextlib.suppress(LedgerError):
        assert all(isinstance(token, int) for token in unpack_prompt(mark + blob))


@given(st.lists(st.integers(0, 1000), min_size=20, max_size=60), st.data())
def test_a_flipped_bit_in_squeezed_tokens_is_never_taken_for_tokens(tokens, data):
    columns = TokenColumns.of(tokens, [-0.5] * len(tokens), 0)
    packed = bytearray(pack_squeezed(columns))
    position = data.draw(st.integers(5, len(packed) - 1))
    packed[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert unpack_columns(bytes(packed), pack_versions(columns.runs)) == columns
    except LedgerError as error:
        assert "damaged" in str(error)


# ---------------------------------------------------------------- weights


@given(st.lists(st.tuples(TEXT, st.integers(0, 40)), max_size=8))
def test_a_manifest_lays_tensors_out_without_gap_or_overlap_and_survives_its_encoding(tensors):
    buffers = [NamedBuffer(n, "uint8", (size,), np.zeros(size, np.uint8)) for n, size in tensors]
    manifest = make_manifest(buffers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=list[TensorSpec]) == manifest
    ends = [0, *(spec.offset + spec.num_bytes for spec in manifest)]
    assert [spec.offset for spec in manifest] == ends[:-1]


@given(st.sampled_from(["float32", "int64", "float16"]), st.integers(0, 5))
def test_only_bytes_are_laid_out(dtype, size):
    with pytest.raises(WeightsError, match="contiguous uint8"):
        make_manifest([NamedBuffer("w", dtype, (size,), np.zeros(size, dtype))])


# ---------------------------------------------------------------- messages


class _Pipe:
    """A transport that keeps what is written, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writelines(self, parts) -> None:
        self.pieces.append(b"".join(parts))


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from([kind for kind in Kind if kind is not Kind.FRAGMENT]),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(),
    ),
    max_size=6,
)


def sent(messages, urgent=()) -> list[bytes]:
    """What one end writes, a piece for every turn of its loop. The `urgent` messages come last."""

    async def send() -> list[bytes]:
        sender, pipe = Framing(lambda *_: None, lambda: None), _Pipe()
        sender._transport = pipe  # type: ignore[assignment]
        for message in messages:
            sender.send(*message)
        for message in urgent:
            sender.send(*message, urgent=True)
        while sender._outgoing:  # noqa: ASYNC110 - turn by turn
            await asyncio.sleep(0)
        return pipe.pieces

    return asyncio.run(send())


def received(data: bytes, cuts) -> list[tuple]:
    """What the other end makes of it, however it is cut."""
    messages: list[tuple] = []
    receiver = Framing(lambda *message: messages.append(message), lambda: None)
    position = turn = 0
    while position < len(data):
        into = receiver.get_buffer(-1)
        part = data[position : position + min(len(into), cuts[turn % len(cuts)])]
        into[: len(part)] = part
        receiver.buffer_updated(len(part))
        position, turn = position + len(part), turn + 1
    return [(*head, payload.value()) for *head, payload in messages]


@given(MESSAGES, st.lists(st.integers(1, 50), min_size=1))
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(messages, cuts):
    assert received(b"".join(sent(messages)), cuts) == messages


@pytest.mark.parametrize("num_tokens", [0, 1, 1000, WRITE_BYTES])
def test_columns_of_any_size_travel_between_other_messages(num_tokens):
    columns = TokenColumns.of(range(num_tokens), [-0.5] * num_tokens, 3)
    messages = [
        (Kind.CALL, 1, 2, "before"),
        (Kind.CALL, 1, 3, [columns, columns]),
        (Kind.CALL, 1, 4, "after"),
    ]
    for cuts in ([7919], [1 << 30]):
        assert received(b"".join(sent(messages)), cuts) == messages


def test_a_large_batch_is_written_piece_by_piece_and_the_loop_turns_in_between():
    columns = TokenColumns.of(range(4 * WRITE_BYTES), [-0.5] * 4 * WRITE_BYTES, 3)
    pieces = sent([(Kind.CALL, 1, 1, columns)])
    assert max(map(len, pieces)) <= 2 * WRITE_BYTES
    assert len(pieces) >= 16  # 4 bytes of id and 4 of log-prob a token


@pytest.mark.parametrize("cut", [7919, 1 << 30])
def test_a_ping_does_not_wait_for_the_batch_before_it(cut):
    columns = TokenColumns.of(range(4 * WRITE_BYTES), [-0.5] * 4 * WRITE_BYTES, 3)
    batch, later, ping = (Kind.CALL, 1, 1, columns), (Kind.CALL, 1, 2, "later"), (Kind.CALL, 1, 3, "ping")
    pieces = sent([batch, later], urgent=[ping])
    assert received(b"".join(pieces), [cut]) == [ping, batch, later]
    assert received(b"".join(pieces[:2]), [cut]) == [ping]


# ---------------------------------------------------------------- events


@given(lines=st.lists(st.binary(max_size=40), max_size=5))
def test_any_events_file_is_read_or_is_a_data_error(lines, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "events.jsonl"
    path.write_bytes(b"\n".join(lines))
    with contextlib.suppress(DataError):
        assume(all(event.kind is not None for event in read_events(path)))
