"""The tables of other frameworks' defaults: our keys, our defaults, and settings that are accepted."""

from __future__ import annotations

import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from millrace.config.schema import Config
from millrace.config.tables.algorithms import PolicyGradient
from tests.tidy.sources import SOURCE

ROOT = SOURCE.parent
sys.path.append(str(ROOT / "scripts"))
import peer_defaults  # noqa: E402

PAGE = (ROOT / "reports" / "peer-defaults.md").read_text(encoding="utf-8")
GENERATED = PAGE.split(peer_defaults.BEGIN)[1].split(peer_defaults.END)[0]


def test_the_page_has_the_rows_and_versions_of_the_script() -> None:
    assert all(f"\n| {ours} | " in GENERATED for ours in peer_defaults.ROWS)
    assert all(f"\n| {name} | `{keys}` |" in GENERATED for name, keys in peer_defaults.SAME.items())
    assert all(f"{package} {version}" in GENERATED for package, version in peer_defaults.WHEELS.items())


@pytest.mark.parametrize("name", peer_defaults.SAME)
def test_settings_for_the_estimator_of_another_framework_are_accepted(name: str) -> None:
    keys = tomllib.loads(f"algorithm = {{ {peer_defaults.SAME[name]} }}")["algorithm"]
    values = {key: None if value == "none" else value for key, value in keys.items()}
    found = PolicyGradient.model_validate({"kind": "grpo", **values})
    assert {key: getattr(found, key) for key in values} == values


def test_the_first_column_has_our_own_defaults() -> None:
    asked = {"task": {"kind": "gym", "name": "chain_sum"}, "reward": {"kind": "gym"}, "model": {"path": "m"}}
    config = Config.model_validate(asked)
    for key, text in re.findall(r"`(\w+\.\w+)` (\S+?),? ", " ".join(f"{row} " for row in peer_defaults.ROWS)):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        shown = f"{value:g}" if isinstance(value, int | float) else str(value).lower()
        assert shown == text, key


def test_a_wheel_without_what_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trl-9.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("trl/a.py", "class C:\n    epsilon: float = field(default=0.2)\n")
        archive.writestr("trl/b.py", "parser.add_argument('--kl', type=float, default=1e-2)\n")
        archive.writestr("trl/c.yaml", "clip:\n  ratio_c: 3.0\n")
    wheel = peer_defaults.Wheel(path)
    found = [("trl/a.py", "C", "epsilon"), ("trl/b.py", "", "--kl"), ("trl/c.yaml", "", "ratio_c")]
    assert [wheel.cell(peer_defaults.Default(*each)) for each in found] == [
        "`epsilon` 0.2",
        "`kl` 0.01",
        "`ratio_c` 3",
    ]
    lacking = [
        ("trl/a.py", "C", "delta"),
        ("trl/b.py", "", "--k"),
        ("trl/c.yaml", "", "c"),
        ("trl/d.py", "", "c"),
    ]
    for each in lacking:
        with pytest.raises(peer_defaults.Missing, match=r"trl-9\.whl"):
            wheel.cell(peer_defaults.Default(*each))
    with pytest.raises(peer_defaults.Missing, match="has nothing like"):
        wheel.cell(peer_defaults.Formula("trl/a.py", "1e-4", "unbiased"))
