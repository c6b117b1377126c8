"""The files of a directory that restore a version, and the versions that no reader needs. Pure.

A directory has for each version an entry, and an anchor (the complete version), a delta against an earlier
version, or both. A reader begins with an anchor, or with a version in its memory, and applies deltas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

ANCHOR, DELTA = "anchor", "delta"

Broken = Collection[tuple[int, str]]  # (version, ANCHOR or DELTA)


class StoredVersion(msgspec.Struct, frozen=True):
    """The entry of a version in a directory.

    Attributes:
        digest        the published digest, of the version's blocks
        num_bytes     of the version's tensors
        manifest      the version's tensors and blocks, as in a slot
        anchor        whether the directory has the version's anchor
        base          the version that the delta was made against; -1: no delta
        base_digest   the published digest of `base`
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
class RestorePath:
    """From version `start` by `deltas`, the oldest first. `anchor`: `start` is read; else it is in memory."""

    start: int
    anchor: bool
    deltas: tuple[int, ...]
    num_bytes: int


def shortest_path(
    entries: Mapping[int, StoredVersion],
    version: int,
    digest: str,
    present: Mapping[int, str],
    broken: Broken = (),
) -> RestorePath | None:
    """The path to `version` with the fewest bytes to read; None: no path.

    Args:
        digest: the published digest of `version`.
        present: complete versions in the reader's memory: version to published digest.
        broken: files that are missing or damaged.
    """
    best: RestorePath | None = None
    at, expected, num_bytes, deltas = version, digest, 0, list[int]()
    while True:
        if present.get(at) == expected:
            path = RestorePath(at, False, tuple(reversed(deltas)), num_bytes)
            return path if best is None or num_bytes < best.num_bytes else best
        entry = entries.get(at)
        if entry is None or entry.digest != expected:
            return best
        if entry.anchor and (at, ANCHOR) not in broken:
            with_anchor = num_bytes + entry.num_bytes
            if best is None or with_anchor < best.num_bytes:
                best = RestorePath(at, True, tuple(reversed(deltas)), with_anchor)
        if not 0 <= entry.base < at or (at, DELTA) in broken:
            return best
        deltas.append(at)
        num_bytes += sum(entry.deltas)
        at, expected = entry.base, entry.base_digest


def anchor_is_due(entries: Mapping[int, StoredVersion], base: int, anchor_every: int) -> bool:
    """Whether the version after `base` needs an anchor. It does if no path leads to `base`, if its own path
    would have `anchor_every` deltas, or if the deltas to `base` have as many bytes as an anchor."""
    entry = entries.get(base)
    path = None if entry is None else shortest_path(entries, base, entry.digest, {})
    if entry is None or path is None:
        return True
    return len(path.deltas) + 1 >= anchor_every or path.num_bytes >= 2 * entry.num_bytes


def unneeded(entries: Mapping[int, StoredVersion], keep: int) -> list[int]:
    """Versions that can go, oldest first: all before the anchor of the path to the oldest of the newest
    `keep` versions."""
    newest = sorted(entries)[-keep:]
    if not newest:
        return []
    path = shortest_path(entries, newest[0], entries[newest[0]].digest, {})
    return [version for version in sorted(entries) if path is not None and version < path.start]
