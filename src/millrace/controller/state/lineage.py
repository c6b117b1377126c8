"""Which digests a version has, and whether a replica serves the version that it reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from millrace.core.errors import DigestMismatchError, UnknownVersionError
from millrace.core.types import Published, Served, Staged, VersionRecord

VERSIONS_REMEMBERED = 256  # far more than any relay has


def replay_difference(earlier: Sequence[VersionRecord], now: VersionRecord) -> str:
    """Why a repeated version has other weights than before. Empty: it has the same, or it is the first.

    Steps that are repeated on another machine, or with other settings, are rounded differently. Some devices
    repeat a step only up to rounding. Then the weights differ in their last bits, and both are correct. With
    the same arithmetic nothing explains a difference.

    Raises: DigestMismatchError: nothing explains the difference.
    """
    if not earlier or now.digest in (record.digest for record in earlier):
        return ""
    if not now.arithmetic:
        return "this device repeats a step only up to rounding"
    newest = earlier[-1]
    if now.arithmetic != newest.arithmetic:
        return f"its steps were done again with other arithmetic: {newest.arithmetic} -> {now.arithmetic}"
    raise DigestMismatchError(
        f"version {now.version} was published with digest {newest.digest}; loaded and repeated, it has "
        f"{now.digest}, with the same arithmetic ({now.arithmetic})\n"
        "  A checkpoint was replaced, or the machine computes wrong: test its memory. Then delete the newest "
        "checkpoint's directory, so that its steps are repeated, or go back: `--resume --from-version N`."
    )


class Lineage:
    """Digests of the newest published versions.

    A version may have several digests. A trainer that went back to a checkpoint publishes the version again,
    and on some devices a repeated step differs in its last bits.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, set[str]] = OrderedDict()
        self._trainer_digests: dict[int, str] = {}  # the last digest of the trainer itself, by version

    def note_digest(self, published: Published | Staged) -> None:
        """Note a digest of the trainer or of a relay. Several ranks digest blocks; a relay digests
        tensors."""
        self._digests.setdefault(published.version, set()).add(published.digest)
        self._digests.move_to_end(published.version)
        if isinstance(published, Published):
            self._trainer_digests[published.version] = published.digest
        while len(self._digests) > VERSIONS_REMEMBERED:
            version, _ = self._digests.popitem(last=False)
            self._trainer_digests.pop(version, None)

    def digest(self, version: int) -> str:
        """The trainer's digest of `version`, when it published that version last.

        Raises: UnknownVersionError: too long ago.
        """
        if version not in self._trainer_digests:
            raise UnknownVersionError(
                f"version {version} cannot be checked: it is not among the newest {VERSIONS_REMEMBERED} that "
                "the trainer published"
            )
        return self._trainer_digests[version]

    def check_served(self, replica: str, version: int, served: Served) -> None:
        """Check the replica's answer to a pull of `version`.

        Raises: DigestMismatchError: it serves another version, or other weights under that version.
        """
        digests = self._digests.get(version, set())
        if served.version == version and served.digest in digests:
            return
        published = " or ".join(sorted(digests)) or "nothing"
        raise DigestMismatchError(
            f"{replica} was told to serve version {version} and serves version {served.version} with digest "
            f"{served.digest}; the trainer published version {version} as {published}\n"
            "  The run must not go on with weights that nobody trained. Look for another writer of the "
            "relay's memory or a faulty engine, then go on with --resume: checkpoints are not affected."
        )
