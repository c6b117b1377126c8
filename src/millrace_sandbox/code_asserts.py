"""Tests that are Python: asserts that call a function, as MBPP, HumanEval and pytest have them."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millrace.core.errors import DataError
from millrace.rewards.program_text import program_of
from millrace_sandbox.changed_arguments import FUNCTIONS, holders, maker, names_in, scopes, sees_changes
from millrace_sandbox.inside.values import PROGRAM, VALUES

CHECK, CANDIDATE = "check", "candidate"
SETUP = ("import_statement", "test_setup_code", "test_imports", "challenge_setup")
"""Columns with code that runs before the tests: of ClassEval, and of MBPP."""
PYTHON = ("functional", "assert_case")
"""The keys below which rLLM and verl have tests that are Python."""
_IN_CLASS = re.compile(r"\bSolution(?:\(\))?\.(?=[A-Za-z_])")
PACKAGES = ("numpy", "sortedcontainers")
"""Packages that programs and tests may import beside the standard library, as far as they are installed."""
KNOWN = {*sys.stdlib_module_names, *PACKAGES, "pytest"}
"""The modules that are no program's."""
NOT_SHARED = {
    *("exec", "open", "tempfile", "shutil", "zipfile", "sqlite3", "tmp_path", "tmpdir"),
    *("capsys", "capfd", "redirect_stdout", "monkeypatch", "patch", "mocker"),
}
PATCHED = re.compile(
    r"sys\.std(out|in) =|mock\.patch|\.redirect_stdout\(|\bPath\(.*\)\.(write_\w+|touch|mkdir|unlink)\("
    r"|\bos\.(makedirs|mkdir|remove|listdir|path\.(exists|isfile|isdir|getsize))\(|\bos\.environ\["
)
"""What a test can only do with a program in its own process."""
STEPS = re.compile(r"\bnext\(|\.(send|throw|close)\(|StopIteration|\byield from\b")
# What catches an exception: its class is the first argument, and another may be the function.
RAISES = r"(\w*\.)?(assertR|r)aises\w*"
# What asks for the class of an object. The class is the second argument.
KINDS = r"is(instance|subclass)|\w+\.assert(Not)?IsInstance"
OF_VALUES = {name for kind in VALUES for name in dir(kind)}
METHODS = {name for kind in VALUES for name in dir(kind) if callable(getattr(kind, name))}
OF_ARRAYS = {*dir(np.ndarray)}
"""The attributes of what is no object of a program's class."""
_GIVEN = ast.Import | ast.ImportFrom | FUNCTIONS | ast.ClassDef | ast.Assign


@dataclass(frozen=True)
class CodeAsserts:
    """Tests that use `names` of the program, `function` first. `setup` runs before the first of them.

    `classes` are those of the names that are classes. `caught` are the program's exceptions that they catch.
    `given` is code of the prompt, and `shared` are its classes, if the tests use it, too.
    `packages` are what the tests import. `unbound` are names that they load and nobody defines.
    `sees_changes`: they look at what a call that returns something has left in its arguments.
    `by_steps`: they drive an iterator item by item, or send something into a generator.
    """

    names: list[str]
    setup: str
    tests: list[str]
    classes: frozenset[str] = frozenset()
    caught: frozenset[str] = frozenset()
    shared: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    unbound: frozenset[str] = frozenset()
    sees_changes: bool = False
    by_steps: bool = False
    given: str = ""

    @property
    def function(self) -> str:
        return self.names[0]


def read_asserts(
    column: Any, columns: Mapping[str, Any], function: str | None = None, prompt: str = ""
) -> CodeAsserts | None:
    """The asserts of a row, or None: the column has no Python.

    A list of texts: each is a test, as MBPP's `test_list`. A text that defines `check(candidate)`, as
    HumanEval's `test`: one test. A text with functions `test_...`, or with classes of such methods, as pytest
    and unittest have them: each is a test. Another text of Python: one test. The code in the columns `SETUP`
    runs first, or with the first test if it calls the program.

    Args:
        function: the function to call, before the one that the row names, and the ones that the tests name.
        prompt: the tests get its code if they use a name that it defines (see `code_given`).
    Raises:
        DataError: they are no Python, compare identity, or name several functions and the row none.
    """
    column = _python_in(column)
    named = function_of(function or columns.get("entry_point"))
    names = [named] if named else []
    lines = [columns.get(name) or "" for name in SETUP]
    setup = "\n".join(each if isinstance(each, str) else "\n".join(each) for each in lines).strip()
    if isinstance(column, str) and f"def {CHECK}(" in column:
        is_called = re.search(rf"^{CHECK}\(", column, re.MULTILINE)
        tests = [column if is_called else f"{column}\n{CHECK}({CANDIDATE})"]
    elif isinstance(column, str) and not column.lstrip().startswith(("{", "[")):
        more, tests = _of_module(column)
        setup = f"{setup}\n{more}"
    elif isinstance(column, list | tuple) and column and all(isinstance(each, str) for each in column):
        tests = list(column)
    else:
        return None
    setup, *tests = (_IN_CLASS.sub("", each) for each in (setup, *tests))
    trees = [_parsed(each) for each in (setup, *tests)]
    if homes := _homes(trees, names):
        imports = _Imports(homes)
        trees = [imports.visit(tree) for tree in trees]
        (setup, *tests), names = map(ast.unparse, trees), names or imports.names
    _refuse_what_is_not_shared(trees)
    unbound = _loaded(trees) - _bound_in(trees) - {CANDIDATE}
    caught = _caught(trees, unbound)
    names = _of_program([name for name in names if name not in caught], trees, unbound - caught)
    texts = [text for text in (prompt, columns.get("prompt")) if isinstance(text, str)]
    given = code_given(prompt, names[0]) or next(filter(None, map(_header, texts)), "")
    tree = ast.parse(given)
    found = (unbound & _bound_in([tree])) - {names[0]}
    defined = found if found - {*names} else set()
    names = [name for name in names if name not in defined]
    setup = f"{given}\n{setup}" if defined else setup
    if {maker(node) for line in next(scopes(trees[0])) for node in ast.walk(line)} & {*names}:
        setup, tests[0] = "", f"{setup}\n{tests[0]}"
    classes = _classes(trees, names, "\n".join(texts))
    return CodeAsserts(
        names,
        setup,
        tests,
        classes,
        caught - found,
        [node.name for node in tree.body if isinstance(node, ast.ClassDef)] if defined else [],
        _packages([*trees, tree] if defined else trees),
        frozenset(unbound - found - caught - {*names}),
        sees_changes(trees, {CANDIDATE, *names}, bool(classes)),
        any(map(STEPS.search, tests)) or STEPS.search(setup) is not None,
        given,
    )


def function_of(name: str | None) -> str | None:
    """The function of a name such as `Solution().add`, as data sets from LeetCode have it."""
    return _IN_CLASS.sub("", name) or None if name else None


def code_given(prompt: str, function: str) -> str:
    """The imports, functions, classes and values that a prompt gives beside `function`, which it begins,
    as in HumanEval. The prompt is Python, or has a block of it. Empty: it does not begin the function."""
    tree = _beginning(prompt, function) or _beginning(program_of(prompt, function), function)
    return _definitions(tree, function)


def _header(text: str) -> str:
    """A prompt that has definitions alone, as those of LeetCodeDataset; empty: another prompt."""
    tree = _python(text)
    others = [one for one in tree.body if not isinstance(one, _GIVEN | ast.Expr)] if tree else []
    return "" if others else _definitions(tree)


def _definitions(tree: ast.Module | None, function: str = "") -> str:
    body = [one for one in (tree.body if tree else ()) if isinstance(one, _GIVEN) and not _is_begun(one)]
    return ast.unparse(ast.Module([one for one in body if getattr(one, "name", None) != function], []))


def _is_begun(node: ast.stmt) -> bool:
    """Whether it is a function without a body, or a class of such functions: the program has these."""
    if isinstance(node, ast.ClassDef):
        methods = [one for one in node.body if isinstance(one, FUNCTIONS)]
        return bool(methods) and all(map(_is_begun, methods))
    empty = ast.Pass | ast.Expr
    return isinstance(node, FUNCTIONS) and all(isinstance(one, empty) for one in node.body)


def continued(code: str, function: str, prompt: str) -> str:
    """The program, behind its prompt if it goes on there in the body of `function`: models without a chat do.

    The prompt may end with the indent of the next line. A tokenizer may leave out the first space of a
    completion, so the first line has the next indent that the body has.
    """
    first = next((line for line in code.split("\n") if line.strip()), "")
    level = len(first) - len(first.lstrip())
    is_whole = level or re.search(rf"^(async )?def {function}\b", code, re.MULTILINE)
    given = 0 if is_whole else len(prompt) - len(prompt.rstrip(" \t"))
    tree = _beginning(prompt, function) if level + given else None
    if tree is None:
        return code
    body = [statement for node in tree.body for statement in getattr(node, "body", ())]
    statements = [node for each in body for node in ast.walk(each) if isinstance(node, ast.stmt)]
    lines = re.split("\r\n?|\n", prompt)  # as Python counts them
    columns = {one.col_offset for one in statements if not lines[one.lineno - 1][: one.col_offset].strip()}
    column = min((one for one in columns if one >= level + given), default=level)
    return f"{prompt.rstrip()}\n{code.replace(first, ' ' * (column - level) + first, 1)}"


def _beginning(prompt: str, function: str) -> ast.Module | None:
    """A prompt that is Python and begins a function; None: another prompt."""
    tree = _python(prompt) if f"def {function}" in prompt else None
    return tree if tree and function in [getattr(node, "name", None) for node in tree.body] else None


def _python(text: str) -> ast.Module | None:
    """A text that is Python, and may end with the first line of a function; None: it is none."""
    for each in (text, f"{text.rstrip()} ..."):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.parse(each)
    return None


def _python_in(column: Any) -> Any:
    """The asserts in a table, and those that are text of JSON; the column, if it is something else."""
    found = column
    if isinstance(column, str) and re.match(r"\s*\[|\s*\{.*\"assert_case\"", column, re.DOTALL):
        with suppress(ValueError, RecursionError):
            found = json.loads(column)
    if isinstance(found, Mapping):
        found = next((found[key] for key in PYTHON if found.get(key)), None)
    is_asserts = isinstance(found, list) and found and all(isinstance(each, str) for each in found)
    return found if is_asserts or isinstance(found, str) else column


def _of_module(code: str) -> tuple[str, list[str]]:
    """Setup and tests of a text that is a module."""
    tree = _parsed(code)
    tests = [test for node in tree.body for test in _tests_of(node)]
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _tests_of(node)}
    left_out = [node for node in tree.body if isinstance(node, ast.Expr) and maker(node.value) in own]
    rest = ast.unparse(ast.Module([node for node in tree.body if node not in left_out], []))
    return (rest, tests) if tests else ("", [rest])


class _Imports(ast.NodeTransformer):
    """Takes away the imports of the modules that are the program. Its names then stand for themselves."""

    def __init__(self, modules: set[str]) -> None:
        self.modules, self.names, self.aliases = modules, list[str](), set[str]()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        if str(node.module) not in self.modules:
            return node
        self.names += [alias.name for alias in node.names if alias.name != "*"]
        named = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
        return ast.parse("\n".join(named) or "pass").body

    def visit_Import(self, node: ast.Import) -> Any:
        self.aliases |= {one.asname or one.name for one in node.names if one.name in self.modules}
        node.names = [one for one in node.names if one.name not in self.modules]
        return node if node.names else ast.Pass()

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if not self.aliases or ast.unparse(node.value) not in self.aliases:
            return self.generic_visit(node)
        self.names.append(node.attr)
        return ast.Name(node.attr, node.ctx)


def _homes(trees: Sequence[ast.Module], named: list[str]) -> set[str]:
    """The modules that are the program: `solution`; else those that tests import the row's function from;
    without such a name the one that nobody has, if the tests use nothing else that is not defined."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imports = [(str(node.module), {one.name for one in node.names}) for node in froms]
    imports += [(one.name, set()) for node in nodes if isinstance(node, ast.Import) for one in node.names]
    if homes := {module for module, _ in imports if module.rpartition(".")[2] == PROGRAM}:
        return homes
    unknown = {module for module, names in imports if names and module.partition(".")[0] not in KNOWN}
    if named:
        return {module for module, names in imports if module in unknown and names & {*named}}
    return unknown if len(unknown) == 1 and not _loaded(trees) - _bound_in(trees) else set()


def _tests_of(node: ast.stmt) -> list[str]:
    """The calls of a test function, or of the test methods of a class, each on an object of its own."""
    if isinstance(node, ast.FunctionDef):
        return [f"{node.name}()"] * node.name.startswith("test")
    if not isinstance(node, ast.ClassDef):
        return []
    names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        call = f"__import__('unittest').TestSuite([{node.name}('{{}}')]).debug()"
    else:
        call = f"_one = {node.name}()\n{'_one.setup_method()' * ('setup_method' in names)}\n_one.{{}}()"
    return [call.format(name) for name in names if name.startswith("test")]


def _parsed(code: str) -> ast.Module:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the tests are no Python: {error}: {code[:80]!r}. Rows in other languages cannot be judged"
        ) from None
    for node in ast.walk(tree):
        if _is_identity(node):
            raise DataError(
                f"a test compares identity, and values are copies here: {ast.unparse(node)[:80]!r}; "
                "write == instead of `is`"
            )
    return tree


def _refuse_what_is_not_shared(trees: Sequence[ast.Module]) -> None:
    """Raises: DataError: the tests look at files or at what a program prints, or patch its process."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = _loaded(trees) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {str(node.module) for node in froms for one in node.names if (one.asname or one.name) in names}
    found = sorted(names & NOT_SHARED)
    found += [each[0] for tree in trees if (each := PATCHED.search(ast.unparse(tree)))]
    if found:
        raise DataError(
            f"the tests use {found[0]!r}, and a program and its tests are two processes: they share no "
            "files, no output and no patches. Leave such rows out"
        )


def _is_identity(node: ast.AST) -> bool:
    if calls := _calls([node], r".*\.assertIs(Not)?"):
        return not any(map(_is_one, calls[0].args))
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    pairs = zip(node.ops, sides, sides[1:], strict=False)
    return any(isinstance(op, ast.Is | ast.IsNot) and not any(map(_is_one, pair)) for op, *pair in pairs)


def _is_one(side: ast.expr) -> bool:
    """Whether every process has one and the same: None, True, `list`."""
    return isinstance(side, ast.Constant) or (isinstance(side, ast.Name) and side.id in dir(builtins))


def _of_program(named: list[str], trees: Sequence[ast.Module], unbound: set[str]) -> list[str]:
    """The names that tests use of the program: those that the row names, and classes; else the one function.

    Raises: DataError: they call several functions, and the row names none.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = {maker(node) for node in nodes}
    owners = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    kinds = {name for call in _calls(nodes, KINDS) for arg in call.args for name in names_in(arg)}
    classes = sorted(name for name in unbound & (calls | owners | kinds) if name[0].isupper())
    values = {name for name in {*named} & _loaded(trees) if name.isupper() and len(name) > 1}
    if values := values - calls - owners - kinds:
        raise DataError(f"the tests use {min(values)!r} of the program, and its functions alone can be asked")
    own = {node.name for node in nodes if isinstance(node, FUNCTIONS)}
    called = (node for node in nodes if isinstance(node, ast.Call) and maker(node) in own)
    passed = {ast.unparse(each) for node in called for each in node.args}
    passed |= {ast.unparse(each) for call in _calls(nodes, RAISES) for each in call.args[1:3]}
    functions = sorted(((calls | passed) & unbound).difference(classes))
    if not (named or unbound):  # a function of the program has the name of a builtin one
        functions = sorted(calls & {*dir(builtins)})
    if not named and (len(functions) > 1 or not (functions or classes)):
        names = functions or "no function"
        raise DataError(
            f"the tests call {names}: name the one in `entry_point` of the row, or import it from `{PROGRAM}`"
        )
    return list(dict.fromkeys([*(named or functions), *classes]))


def _caught(trees: Sequence[ast.Module], unbound: set[str]) -> frozenset[str]:
    """The program's classes of exceptions: tests catch them, and ask whether an exception is one.

    Raises: DataError: they do something else with one, too.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    catching = [node.type for node in nodes if isinstance(node, ast.ExceptHandler) and node.type]
    catching += [call.args[0] for call in _calls(nodes, RAISES) if call.args]
    asking = [arg for call in _calls(nodes, KINDS) for arg in call.args[1:2]]
    found = unbound & {name for each in catching for name in names_in(each)}
    fine = {id(node) for each in (*catching, *asking) for node in ast.walk(each)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in found and id(node) not in fine:
            raise DataError(
                f"a test catches the program's exception {node.id!r}, and can do nothing else with it"
            )
    return frozenset(found)


def _calls(nodes: Iterable[ast.AST], pattern: str) -> list[ast.Call]:
    """The calls of what has such a name."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [call for call in calls if re.fullmatch(pattern, ast.unparse(call.func))]


def _classes(trees: Sequence[ast.Module], names: Sequence[str], prompt: str) -> frozenset[str]:
    """Those of the names that are of classes. They begin with a capital letter, as functions may, too. So
    the prompt says that it is a class, or the tests ask whether an object is of it, or call it without
    arguments, or what its call gives has an attribute that no value has, or reads one that is a method."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = {name for call in _calls(nodes, KINDS) for arg in call.args[1:] for name in names_in(arg)}
    found |= {name for name in names if re.search(rf"\bclass\s+`?{name}\b", prompt)}
    holds = holders(nodes, names)
    plain = OF_VALUES | OF_ARRAYS if "numpy" in _packages(trees) else OF_VALUES
    every = [node for node in nodes if isinstance(node, ast.Attribute)]
    read = {id(node) for node in every} - {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    used = [node for node in every if node.attr not in plain or (id(node) in read and node.attr in METHODS)]
    found |= {maker(node.value) or holds.get(ast.unparse(node.value), "") for node in used}
    found |= {maker(node) for node in nodes if isinstance(node, ast.Call) and not node.args + node.keywords}
    return frozenset(name for name in names if name in found & {*holds})


def _loaded(trees: Sequence[ast.Module]) -> set[str]:
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound_in(trees: Sequence[ast.Module]) -> set[str]:
    return {*dir(builtins), *(name for tree in trees for node in ast.walk(tree) for name in _bound(node))}


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.alias(name=name, asname=None):
            yield name.partition(".")[0]
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.alias(asname=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)):
            yield name


def _packages(trees: Sequence[ast.Module]) -> list[str]:
    """Those of `PACKAGES` that are imported."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return [name for name in PACKAGES if name in {each.partition(".")[0] for each in names}]
