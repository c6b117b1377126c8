"""Which files of a directory lead to a version, and which nobody needs any more. Pure.

A directory holds for each version an entry, and beside it an anchor (the whole version), a delta against an
earlier version, or both. A reader begins at an anchor or at a version that it holds, and applies deltas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

ANCHOR, DELTA = "anchor", "delta"

Broken = Collection[tuple[int, str]]  # (version, ANCHOR or DELTA)


class StoredVersion(msgspec.Struct, frozen=True):
    """What a directory says of a version.

    Attributes:
        digest        as it was published, of its pieces
        num_bytes     of its tensors
        manifest      its tensors and their pieces, as in a slot
        anchor        whether the whole version is there
        base          the version that its delta was made against; -1: it has no delta
        base_digest   of that one, as it was published
        deltas        bytes of the delta of each chunk, in order
    """

    version: int
    digest: str
    num_bytes: int
    manifest: bytes
    anchor: bool
    base: int = -1
    base_digest: str = ""
    deltas: list[int] = []


@dataclass(frozen=True, slots=True)
class Way:
    """From `start` by `deltas`, the oldest first. `anchor`: `start` is read; else it is held."""

    start: int
    anchor: bool
    deltas: tuple[int, ...]
    num_bytes: int


def shortest(
    entries: Mapping[int, StoredVersion],
    version: int,
    digest: str,
    held: Mapping[int, str],
    broken: Broken = (),
) -> Way | None:
    """The way to `version` with the fewest bytes to read; None: there is none.

    Args:
        digest: of `version`, as it was published.
        held: what the reader has whole: version to published digest.
        broken: files that turned out to be missing or damaged.
    """
    best: Way | None = None
    at, expected, num_bytes, path = version, digest, 0, list[int]()
    while True:
        if held.get(at) == expected:
            found = Way(at, False, tuple(reversed(path)), num_bytes)
            return found if best is None or num_bytes < best.num_bytes else best
        entry = entries.get(at)
        if entry is None or entry.digest != expected:
            return best
        if entry.anchor and (at, ANCHOR) not in broken:
            whole = num_bytes + entry.num_bytes
            if best is None or whole < best.num_bytes:
                best = Way(at, True, tuple(reversed(path)), whole)
        if not 0 <= entry.base < at or (at, DELTA) in broken:
            return best
        path.append(at)
        num_bytes += sum(entry.deltas)
        at, expected = entry.base, entry.base_digest


def anchor_is_due(entries: Mapping[int, StoredVersion], base: int, anchor_every: int) -> bool:
    """Whether the version after `base` must be whole: no chain leads to `base`, the chain has `anchor_every`
    versions with it, or to read the chain takes as long as to read a whole version."""
    entry = entries.get(base)
    if entry is None:
        return True
    way = shortest(entries, base, entry.digest, {})
    if way is None:
        return True
    return len(way.deltas) + 1 >= anchor_every or way.num_bytes >= 2 * entry.num_bytes


def needless(entries: Mapping[int, StoredVersion], kept: int) -> list[int]:
    """Versions that can go, oldest first: all before the anchor from which the oldest of the newest `kept`
    versions is reached."""
    newest = sorted(entries)[-kept:]
    if not newest:
        return []
    way = shortest(entries, newest[0], entries[newest[0]].digest, {})
    return [version for version in sorted(entries) if way is not None and version < way.start]
