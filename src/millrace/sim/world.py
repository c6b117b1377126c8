"""What outlives a simulated process: the host's weight slots and its disk.

One `World` is shared by all roles of a run, passed to each as a constructor argument.
"""

from __future__ import annotations

from millrace.core.errors import UnknownVersionError


def digest_of(version: int) -> str:
    """The digest of a simulated version."""
    return f"sim-{version}"


class Shelf:
    """The slots of one relay. A version is written into a slot, then staged, later overwritten."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._written: dict[int, str] = {}  # version -> digest, oldest first
        self._staged: set[int] = set()

    @property
    def held(self) -> list[int]:
        """Complete versions, oldest first."""
        return sorted(self._staged)

    def begin_write(self, version: int) -> None:
        """The slot of `version`, or else the one written longest ago, is torn if none is free."""
        if version not in self._written and len(self._written) == self._slots:
            self._tear(next(iter(self._written)))
        self._tear(version)

    def write(self, version: int, digest: str) -> None:
        self._written[version] = digest

    def _tear(self, version: int) -> None:
        self._written.pop(version, None)
        self._staged.discard(version)

    def written(self, version: int) -> str:
        """Raises: UnknownVersionError."""
        if version not in self._written:
            raise UnknownVersionError(f"version {version} was not written; slots hold {list(self._written)}")
        return self._written[version]

    def stage(self, version: int) -> None:
        self._staged.add(version)

    def staged(self, version: int) -> str:
        """Raises: UnknownVersionError."""
        if version not in self._staged:
            raise UnknownVersionError(f"version {version} is not held; held: {self.held}")
        return self._written[version]


class World:
    """Shelves by endpoint path, checkpoints by path."""

    def __init__(self) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.checkpoints: dict[str, int] = {}
        self.exports: list[str] = []
        self._opened = 0

    def open_shelf(self, slots: int) -> str:
        """A new shelf's path; never the path of an earlier one."""
        self._opened += 1
        path = f"sim/slots-{self._opened}"
        self.shelves[path] = Shelf(slots)
        return path

    def shelf(self, path: str) -> Shelf:
        """Raises: UnknownVersionError when its relay is gone."""
        if path not in self.shelves:
            raise UnknownVersionError(f"nothing is open at {path}: the relay that opened it is gone")
        return self.shelves[path]
