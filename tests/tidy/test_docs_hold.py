"""What the documents claim exists, loads and is up to date."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
import typer
from scripts.pages import names_page as names

import millrace
from millrace.cli import keys as reference
from millrace.cli.app import app
from millrace.config.load import Source, combine, load_as, parse_value, read_mapping
from millrace.config.schema import Config
from millrace.config.tables.algorithms import PRESETS
from millrace.config.tables.section import Section
from millrace.config.tree import leaves
from millrace.sft.sft_config import SupervisedConfig
from millrace_sim.config import PlanConfig, SimulatedConfig
from millrace_sweeps.sweep_config import SweepConfig
from tests.tidy.sources import tracked_files
from tests.tidy.test_words import BINARY

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "reports").glob("*.md")])
INDEX = ROOT / "docs" / "README.md"

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LABEL = re.compile(r"\[([^\]]*)\]\([^)]*\)")
NAMED = re.compile(r"\b((?:docs|reports)/[a-z-]+\.md)\b")
COMMAND = re.compile(r"\bmillrace ((?:[a-z]+-)?[a-z]+)\b([^\n`]*)")
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


OTHERS: dict[str, type[Section]] = {
    "data": SupervisedConfig,
    "cluster": SimulatedConfig,
    "devices": PlanConfig,
    "base": SweepConfig,
}
"""Configurations that are not a training run's, by a key that only they have."""


def schema_of(text: str) -> type[Section]:
    return next((OTHERS[key] for key in tomllib.loads(text) if key in OTHERS), Config)


def blocks(path: Path, language: str) -> list[str]:
    return [body for _, found, body in FENCE.findall(path.read_text(encoding="utf-8")) if found == language]


@pytest.mark.parametrize("name", NAMES)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    path = ROOT / name
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [target for target in targets if target and not (path.parent / target).exists()]
    assert not missing


def anchors(path: Path) -> set[str]:
    """Of the headings of a document, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = [LABEL.sub(r"\1", heading).lower() for heading in HEADING.findall(text)]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_heading_leads_to_one(name: str) -> None:
    path = ROOT / name
    links = [link.partition("#") for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8")))]
    local = [(file, anchor) for file, _, anchor in links if anchor and "://" not in file]
    targets = [(path.parent / file if file else path, anchor) for file, anchor in local]
    wrong = [(to.name, anchor) for to, anchor in targets if to.suffix == ".md" and anchor not in anchors(to)]
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_path_of_the_project_that_a_document_names_is_there(name: str) -> None:
    """A path below `src/millrace`, too, where it has a folder of there. Reports name files of their time."""
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|examples|scripts)/[\w/.-]+?|tests/[\w/]+\.py)(?::[^`]*)?`", text)
    folders = {path.name for path in (ROOT / "src" / "millrace").iterdir() if path.is_dir()}
    inside = [path for path in re.findall(r"`([\w/]+/\w+\.py)\b", text) if path.split("/")[0] in folders]
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [path for path in inside if not (ROOT / "src" / "millrace" / path).exists()]
    assert not missing or name.startswith(("reports/", "CHANGELOG"))


def test_every_document_that_code_names_is_there() -> None:
    folders = ("src", "tests", "examples", "scripts")
    files = [path for path in tracked_files() if path.relative_to(ROOT).parts[0] in folders]
    named = {
        (path.name, found)
        for path in files
        if path.suffix not in BINARY
        for found in NAMED.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert len(named) > 20
    assert not [(file, found) for file, found in named if not (ROOT / found).is_file()]


@pytest.mark.parametrize("name", NAMES)
def test_every_toml_block_loads(name: str, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(ROOT / name, "toml")):
        if "requires-python" in block:
            continue
        tree, schema = tomllib.loads(block), schema_of(block)
        if {"model", "task", "reward"} <= tree.keys() or schema is not Config:
            (tmp_path / f"{number}.toml").write_text(block, encoding="utf-8")
            load_as(schema, tmp_path / f"{number}.toml")
        else:
            known = {leaf for leaf, _, _ in leaves(schema)}
            assert all(any(leaf.startswith(key) for leaf in known) for key in tree), block


EXAMPLES = sorted([*(ROOT / "examples").glob("*.toml"), *(ROOT / "src").rglob("*.toml")])


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.name for path in EXAMPLES])
def test_every_example_configuration_loads(path: Path) -> None:
    """Those that leave the model to the user get one."""
    schema = schema_of(path.read_text(encoding="utf-8"))
    load_as(schema, path, ["model.path=MODEL"] if schema in (Config, SupervisedConfig) else [])


@pytest.mark.parametrize("name", NAMES)
def test_every_python_block_compiles(name: str) -> None:
    for block in blocks(ROOT / name, "python"):
        compile(block, name, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_exists(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    for command, rest in COMMAND.findall(_shell_text(ROOT / name)):
        assert command in group.commands, f"millrace {command}"
        known = {option for parameter in group.commands[command].params for option in parameter.opts}
        used = set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest)) - {"--debug", "--help"}
        assert used <= known, f"millrace {command}: {used - known}"


@pytest.mark.parametrize("name", NAMES)
def test_every_make_target_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = re.findall(r"^\s*make ([a-z-]+)", _shell_text(ROOT / name), re.MULTILINE)
    assert set(used) <= targets


@pytest.mark.parametrize("file", reference.File)
def test_the_reference_of_keys_has_every_key(file: reference.File) -> None:
    schema = reference.schema_of(file)
    text = "\n".join(reference.as_markdown(reference.rows(schema)))
    silent = ("random", "optuna", "stop")  # tables that may be left out
    missing = [
        leaf for leaf, _, _ in leaves(schema) if not leaf.endswith(".kind") and f"`{leaf}`" not in text
    ]
    assert [leaf for leaf in missing if leaf not in silent] == []


def test_the_page_of_sweeps_has_every_key() -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    assert [leaf for leaf, _, _ in leaves(SweepConfig) if f"`{leaf}`" not in text] == ["random", "optuna"]


@pytest.mark.parametrize("schema", [Config, SupervisedConfig, SimulatedConfig, SweepConfig])
def test_every_configuration_key_says_what_it_means(schema: type[Section]) -> None:
    silent = [
        leaf for leaf, _, field in leaves(schema) if not field.description and not leaf.endswith(".kind")
    ]
    assert not silent


def test_the_reference_of_names_has_every_public_name() -> None:
    text = names.page()
    assert "`Run.metrics`" in text
    assert not [name for name in millrace.__all__ if f"`millrace.{name}`" not in text]


def test_every_preset_says_what_differs_from_its_paper_and_the_keys_are_not_its_defaults() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text().split("### What differs from the papers")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|(.*)\|$", text.split("###")[0], re.MULTILINE)
    assert sorted(kind for kind, _, _ in rows) == sorted(PRESETS)
    base = {
        "model.path": "m",
        "task.kind": "gym",
        "task.name": "x",
        "reward.kind": "gym",
        "batch.prompts": 16,
    }
    for kind, _, keys in rows:
        settings = [text.split(" = ") for text in re.findall(r"`([^`]+)`", keys)]
        nearer = {
            name if "." in name else f"algorithm.{name}": parse_value(value) for name, value in settings
        }
        given = ({**base, "algorithm.kind": kind, **more} for more in ({}, nearer))
        default, changed = (combine(Config, Source({}, {}), read_mapping(Config, one, "")) for one in given)
        for key in nearer:
            section, name = key.split(".")
            one, other = (getattr(getattr(config, section), name) for config in (default, changed))
            assert one != other, f"{kind}: {name} is {one!r} by default"


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_exists_or_is_named_with_its_commit(name: str) -> None:
    paragraphs = (ROOT / name).read_text(encoding="utf-8").split("\n\n")
    missing = [
        benchmark
        for paragraph in paragraphs
        for benchmark in re.findall(r"\bbenchmarks/\w+\.py\b", paragraph)
        if not (ROOT / benchmark).exists() and not re.search(r"commit\s[0-9a-f]{7}", paragraph)
    ]
    assert not missing


def test_every_document_is_in_the_index() -> None:
    linked = set(LINK.findall(INDEX.read_text(encoding="utf-8")))
    documents = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert documents | {f"../reports/{path.name}" for path in (ROOT / "reports").glob("*.md")} <= linked


def test_no_file_of_the_project_is_larger_than_a_megabyte() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert not [path for path in paths if path.is_file() and path.stat().st_size > 1_000_000]


def _shell_text(path: Path) -> str:
    """Shell blocks, and code in running text that is a command."""
    text = path.read_text(encoding="utf-8")
    shell = "\n".join(body for _, found, body in FENCE.findall(text) if found in ("sh", "bash", "console"))
    inline = re.findall(r"`(millrace [^`]+|make [^`]+)`", FENCE.sub("", text))
    return shell + "\n" + "\n".join(inline)
