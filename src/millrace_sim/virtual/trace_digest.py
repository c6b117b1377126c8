"""A digest of all events. Two runs with the same digest took the same path."""

from __future__ import annotations

import msgspec
import xxhash

from millrace.core.events import Event


class TraceDigest:
    """An event sink. Reduces kind, time and sorted fields of every event to one number.

    Floats enter exactly, dicts within fields in their own order. Fields must be data (numbers, strings,
    lists, dicts, structs, dataclasses): an object whose text has an address would differ from run to
    run, so it raises TypeError.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._encode = msgspec.msgpack.Encoder().encode

    def __call__(self, event: Event) -> None:
        self._hash.update(self._encode((event.kind, event.time_s, sorted(event.fields.items()))))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
