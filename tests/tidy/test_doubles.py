"""Every class that plays a part of `core/protocols.py` takes what the part is given.

Roles are called by name over a wire, and made from strings: no type checker looks. Players are in the
package, in tests and in benchmarks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from tests.tidy.sources import ROOT, SOURCE, Module, dotted, parse

Function = ast.FunctionDef | ast.AsyncFunctionDef

COMMON = {"close"}
"""Makes nothing a player."""
STANDS_ASIDE = {"RelayProcess", "Sleepless"}
"""A relay's process that a test asks in step: it has `call` and `kill`, and is no handle. A part of an
engine, whose `sleep` and `wake` are no commands of a role."""

FIELDS = {"Recovery": {"Recovered"}}
"""Who plays a protocol without methods."""
HEIRS = 3
"""Generations."""


@dataclass(frozen=True, eq=False)
class Class:
    module: Module
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, Function]:
        return {method.name: method for method in self.node.body if isinstance(method, Function)}

    @property
    def bases(self) -> set[str]:
        return {dotted(base).rpartition(".")[2] for base in self.node.bases}


def classes(module: Module) -> Iterator[Class]:
    yield from (Class(module, node) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


@cache
def protocols(path: str) -> dict[str, dict[str, Function]]:
    """The methods of every protocol of a file of the package that has any."""
    found = classes(parse(SOURCE / "millrace" / path, path))
    return {one.node.name: one.methods for one in found if "Protocol" in one.bases and one.methods}


PARTS = protocols("core/protocols.py")
KINDS = PARTS | protocols("rollout/protocol.py")
"""With an engine, which has some names of a replica. Engines are held to theirs by `tests/engines`."""


@cache
def players() -> dict[Class, set[str]]:
    """Every class of the project that plays a part, with its parts."""
    names = {name for methods in PARTS.values() for name in methods} - COMMON
    defines = re.compile(rf"^\s+(async )?def ({'|'.join(sorted(names))})\(", re.MULTILINE)
    files = (path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
    modules = [parse(path, path.stem) for path in sorted(files) if defines.search(path.read_text())]
    return cast([one for module in modules for one in classes(module) if "Protocol" not in one.bases])


def cast(everyone: Sequence[Class]) -> dict[Class, set[str]]:
    """Which parts each class plays: by its own methods, else by those of a class that it inherits from."""
    playing = {one: parts_of(one) for one in everyone if one.node.name not in STANDS_ASIDE}
    by_name = {one.node.name: parts for one, parts in playing.items()}
    for one, parts in [*playing.items()] * HEIRS:
        parts |= {part for base in one.bases for part in by_name.get(base, ())}
    return {one: parts for one, parts in playing.items() if parts}


def parts_of(one: Class) -> set[str]:
    """Those of which it has half the methods, and two or all: unless it has these as another kind's."""
    own = one.methods.keys() - COMMON
    shared = {kind: own & methods.keys() for kind, methods in KINDS.items()}
    sizes = {kind: len(methods.keys() - COMMON) for kind, methods in KINDS.items()}
    return {
        part
        for part in PARTS
        if len(shared[part]) >= max(min(2, sizes[part]), (sizes[part] + 1) // 2)
        and not any(shared[part] < others for others in shared.values())
    }


def misfits(playing: dict[Class, set[str]]) -> list[str]:
    """Each method that cannot stand where its part's method is called."""
    names = FIELDS | {one.node.name: parts for one, parts in playing.items()}
    return [
        f"{one.module.at(method)}: {one.node.name}.{name}: {misfit}; {part}.{name} is in core/protocols.py"
        for one, parts in playing.items()
        for part in sorted(parts)
        for name, method in one.methods.items()
        if name in PARTS[part]
        for misfit in differences(PARTS[part][name], method, names)
    ]


def differences(part: Function, played: Function, playing: dict[str, set[str]]) -> Iterator[str]:
    """In what `played` is not `part`. `playing`: the parts of classes by their names."""
    if not takes(part.args, played.args):
        yield f"takes ({ast.unparse(played.args)}), not ({ast.unparse(part.args)})"
    if way(part) != way(played):
        yield f"is called with {way(played)!r}, not {way(part)!r}"
    promised, own = named_in(part), named_in(played)
    own = {name for name in own if not playing.get(name, set()) & promised}
    if not own <= promised | {"Any"} and "Any" not in promised:
        yield f"returns {ast.unparse(played.returns)}, not {ast.unparse(part.returns)}"


def takes(wanted: ast.arguments, taken: ast.arguments) -> bool:
    """The same names, kinds and defaults, in the same order; `*` and `**` take whatever is left."""
    positional, named = sorted_out(wanted)
    own_positional, own_named = sorted_out(taken)
    if taken.vararg and not wanted.vararg:
        positional = positional[: len(own_positional)]
    if taken.kwarg:
        named &= own_named
    whole = bool(taken.vararg) or not wanted.vararg
    return whole and positional == own_positional and named == own_named


def sorted_out(arguments: ast.arguments) -> tuple[list[str], set[str]]:
    """What is given by place and what only by name, each with its default."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    without = len(by_place) - len(arguments.defaults)
    defaults = [None] * without + [*arguments.defaults]
    return (
        [described(*one) for one in zip(by_place, defaults, strict=True)],
        {described(*one) for one in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)},
    )


def described(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def way(function: Function) -> str:
    """How it is called."""
    if named_in(function) & {"AsyncIterator", "AsyncGenerator"}:
        return "async for"
    if isinstance(function, ast.FunctionDef):
        return "no await"
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    return "async for" if yields else "await"


def named_in(function: Function) -> set[str]:
    """Every name in the annotation of what it returns; none where there is no annotation."""
    if function.returns is None:
        return set()
    names = {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)}
    manages = any(dotted(decorator) == "contextmanager" for decorator in function.decorator_list)
    return names - {"Iterator"} | {"AbstractContextManager"} if manages else names


def test_every_part_is_played_as_its_protocol_says():
    assert not misfits(players()), "\n".join(misfits(players()))


def test_the_parts_of_a_run_have_their_known_players():
    known = {"TrainerWorker", "SimTrainer", "PlayedTrainer", "PlayedRelay", "Troupe", "SqliteLedger"}
    assert {one.node.name for one in players()} >= known
    assert set().union(*players().values()) == set(PARTS)


@pytest.mark.parametrize(
    ("method", "misfit"),
    [
        ("async def await_saved(self): ...", "takes (self), not (self, spared: Sequence[int]=())"),
        ("async def await_saved(self, kept=()): ...", "takes (self, kept=())"),
        ("async def await_saved(self, spared=None): ...", "takes (self, spared=None)"),
        ("async def await_saved(self, *, spared=()): ...", "takes (self, *, spared=())"),
        ("async def publish(self, endpoint): ...", "takes (self, endpoint)"),
        ("def await_saved(self, spared=()): ...", "is called with 'no await', not 'await'"),
        ("async def await_saved(self, spared=()): yield", "is called with 'async for', not 'await'"),
        ("async def await_saved(self, spared=()) -> Staged: ...", "returns Staged, not CheckpointInfo"),
        ("async def await_saved(self, *args): ...", None),
        ("async def step(self, batch) -> StepResult: ...", None),
    ],
)
def test_a_double_that_differs_is_told_of(method, misfit):
    others = ("load", "export", "await_published")
    body = [*(f"async def {name}(self, *args): ..." for name in others), method]
    tree = ast.parse("\n    ".join(["class Double:", *body]))
    module = Module("double", ROOT / "double.py", tree, len(body))
    found = misfits(cast(list(classes(module))))
    assert [misfit in one for one in found] == ([True] if misfit else []), found
