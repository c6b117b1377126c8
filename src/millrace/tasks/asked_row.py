"""The row that is scored is the row that was asked: the digest of its columns is that of its prompt."""

from __future__ import annotations

import copy
import datetime
import hashlib
import numbers
from collections.abc import Mapping, Sequence, Set
from typing import Any

from millrace.core.errors import DataError
from millrace.tasks.parts import Part
from millrace.tasks.rows import Row

DIGEST_BYTES = 8
PLAIN = (
    *(str, bytes, bool, type(None), numbers.Number),
    *(datetime.date, datetime.time, datetime.timedelta),  # a datetime is a date
)
"""Values whose `repr` is their content."""


def asked_columns(part: Part, row: int, digest: str) -> Row:
    """The columns, as `own_copy`. An empty digest fits every row.

    Raises: DataError: the row is broken, or another than that of the digest.
    """
    columns = part.task.columns(row)
    if digest and row_digest(columns) != digest:
        raise DataError(
            f"{part.row_id(row)} is another row than when its prompt was made, and its completions are not "
            "scored.\n  Make the row the same in every process: from a seed of its own, in an order that is "
            "no set's, by the same version of its library, from a file that does not change."
        )
    return own_copy(columns)


def own_copy(columns: Row) -> Row:
    """The columns, for one caller, who may change them."""
    try:
        return copy.deepcopy(columns)
    except Exception:  # an object that cannot be copied: all callers share it
        return columns


def row_digest(columns: Mapping[str, Any]) -> str:
    """16 hexadecimal digits. Equal columns have equal digests, in every process.

    The order of keys, and that of a set, is no content. Of an object of another library only its type
    counts, unless the object is an array: its `repr` may hold an address, or leave values out.
    """
    written = _written(columns).encode(errors="surrogatepass")
    return hashlib.blake2b(written, digest_size=DIGEST_BYTES).hexdigest()


def _written(value: Any) -> str:
    """A text that is the same in every process."""
    match value:
        case _ if isinstance(value, PLAIN):
            return repr(value)
        case Mapping():
            return "{" + ",".join(sorted(f"{_written(k)}:{_written(v)}" for k, v in value.items())) + "}"
        case Set():
            return "set(" + ",".join(sorted(map(_written, value))) + ")"
        case Sequence():
            return "[" + ",".join(map(_written, value)) + "]"
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # an array
        return f"array({value.dtype},{_written(value.tolist())})"
    kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"
