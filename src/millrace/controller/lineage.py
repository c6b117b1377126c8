"""Which digests a version has, and whether a replica serves the version that it reports."""

from __future__ import annotations

from collections import OrderedDict

from millrace.core.errors import DigestMismatchError
from millrace.core.types import Published, Served

VERSIONS_REMEMBERED = 256  # far more than any relay holds


class Lineage:
    """Digests of the newest published versions.

    A version may have several digests. A trainer that went back to a checkpoint publishes the version again,
    and on some devices a repeated step differs in its last bits. Each digest is of weights that the trainer
    had.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[int, set[str]] = OrderedDict()

    def published(self, published: Published) -> None:
        self._digests.setdefault(published.version, set()).add(published.digest)
        self._digests.move_to_end(published.version)
        while len(self._digests) > VERSIONS_REMEMBERED:
            self._digests.popitem(last=False)

    def check_served(self, replica: str, asked: int, served: Served) -> None:
        """What a replica says after a pull of version `asked`.

        Raises: DigestMismatchError: it serves another version, or other weights under that version.
        """
        known = self._digests.get(asked, set())
        if served.version == asked and served.digest in known:
            return
        due = " or ".join(sorted(known)) or "nothing"
        raise DigestMismatchError(
            f"{replica} was told to serve version {asked} and serves version {served.version} with digest "
            f"{served.digest}; the trainer published version {asked} as {due}\n"
            "  The run must not go on with weights that nobody trained. Look for another writer of the "
            "relay's memory or a faulty engine, then go on with --resume: checkpoints are not affected."
        )
