"""Which line sets which key."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from millrace.config.toml_text import as_toml, key_lines

TEXT = '''# a comment

steps = 3  # with = and [brackets]
[model]
path = """
not = "a key"
[nor.a.table]
"""
dtype = "x"

[task.options]
"quoted.key" = [
  1,  # inside
  2,
]
inline = { a = 1, b = "}" }
dotted.key = 1
[[list]]
x = 1
'''


def test_every_way_to_write_a_key_has_its_line() -> None:
    tomllib.loads(TEXT)
    lines = key_lines(TEXT)
    assert lines["steps"] == 3
    assert lines["model"] == 4
    assert lines["model.path"] == 5
    assert lines["model.dtype"] == 9
    assert lines["task.options"] == 11
    assert lines["task.options.quoted.key"] == 12
    assert lines["task.options.inline.b"] == 16
    assert lines["task.options.dotted.key"] == 17
    assert lines["list.x"] == 19


def test_the_text_inside_a_string_is_no_key() -> None:
    assert not any(key.startswith(("not", "nor", "model.not")) for key in key_lines(TEXT))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def _as_read(value: object) -> object:
    match value:
        case None:
            return "none"
        case list():
            return [_as_read(item) for item in value]
        case dict():
            return {key: _as_read(item) for key, item in value.items()}
    return value


@given(VALUES.filter(lambda value: "\\ud" not in ascii(value)))
def test_a_value_written_as_toml_reads_back_equal(value: object) -> None:
    assert tomllib.loads(f"x = {as_toml(value)}") == {"x": _as_read(value)}
