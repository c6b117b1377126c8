"""Damage for hypothesis: bytes of a file that changed, and JSON that is well formed but says something else.

`MILLRACE_FUZZ_EXAMPLES=10000` makes every test of damaged files a long one.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("MILLRACE_FUZZ_EXAMPLES", "60"))

fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < 1000,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

ODD = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, float("nan"), float("inf"), -0.5, 1e308])
    | st.sampled_from(["", "none", "\x00", "../../etc/passwd", "\ud800", "1", "a:b", "simulated", "x" * 300])
    | st.sampled_from([[], {}, [[]], [None], {"": None}, {"kind": "none"}, [1, "a", {}]])
)


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """One to three changes: a bit, a byte, a piece removed, doubled or put in, an end cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(changed) - 1)))
        length = draw(st.integers(1, 40))
        match draw(st.sampled_from(["bit", "byte", "remove", "double", "put in", "cut"])):
            case "bit" if changed:
                changed[at] ^= 1 << draw(st.integers(0, 7))
            case "byte" if changed:
                changed[at] = draw(st.integers(0, 255))
            case "remove":
                del changed[at : at + length]
            case "double":
                changed[at:at] = changed[at : at + length]
            case "put in":
                changed[at:at] = draw(st.binary(min_size=1, max_size=12))
            case "cut":
                del changed[at:]
    return bytes(changed)


@st.composite
def damaged_tree(draw: st.DrawFn, tree: Any) -> Any:
    """One to three values of a JSON tree replaced by odd ones, removed, or added."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(changed))
        if not places:
            return draw(ODD)
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                holder[key] = copy.deepcopy(draw(ODD))
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(["kind", "path", "odd", ""]))] = copy.deepcopy(draw(ODD))
            case "add":
                holder.append(copy.deepcopy(draw(ODD)))
    return changed


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
