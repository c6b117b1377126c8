"""Whether tests that are Python look at what a function has left in its arguments, beside what it returns."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def sees_changes(trees: Sequence[ast.Module], functions: set[str], has_objects: bool) -> bool:
    """Whether an assert compares an argument of a call with something that the program cannot change, as in
    `k = f(xs)` and then `assert xs[:k] == [1, 2]`.

    Objects may keep an argument, and change it later: then always.

    False also if an assert compares two things that the program can change, as `f(xs) == sorted(xs)`. There a
    program that empties its argument would be right.
    """
    bodies = [found for tree in trees for found in scopes(tree)]
    seen = [side for body in bodies for side in _compared(body, functions)]
    return (has_objects or any(is_argument for is_argument, _ in seen)) and not any(
        is_loose for _, is_loose in seen
    )


def scopes(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements of each function, and those of the module beside them."""
    yield [node for node in tree.body if not isinstance(node, FUNCTIONS | ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield node.body


def _compared(body: list[ast.stmt], functions: set[str]) -> Iterator[tuple[bool, bool]]:
    """Of each comparison in asserts: whether it has an argument of a call in it, and whether the program can
    change all its sides, one by an argument."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    functions = functions | {name for name in holders(nodes, functions) if name.isidentifier()}
    calls = [node for node in nodes if isinstance(node, ast.Call) and names_in(node.func) & functions]
    if not calls:
        return
    arguments = {name for call in calls for name in _passed(call)}
    first_line = min(call.lineno for call in calls)
    changed = _derived(nodes, arguments | functions, first_line)
    by_arguments = _derived(nodes, arguments, first_line)
    inside = {id(node) for call in calls for node in ast.walk(call)}
    for sides in _sides(nodes):
        names = [names_in(side, with_index=False) for side in sides]
        outside = {
            node.id
            for side in sides
            for node in ast.walk(side)
            if isinstance(node, ast.Name) and id(node) not in inside
        }
        has_argument = bool(outside & arguments)
        is_loose = all(each & changed for each in names) and any(each & by_arguments for each in names)
        yield has_argument, is_loose


def _sides(nodes: list[ast.AST]) -> Iterator[list[ast.expr]]:
    """What asserts compare: with an operator, or in a call such as `assertEqual(a, b)` and `same(a, b)`."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            yield [node.left, *node.comparators]
        elif isinstance(node, ast.Assert) and isinstance(node.test, ast.Call) and len(node.test.args) > 1:
            yield node.test.args
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call) and len(call.args) > 1:
            yield from [call.args] * ("assert" in ast.unparse(call.func))


def _passed(call: ast.Call) -> Iterator[str]:
    """The names of the objects that a call gets, not those of which it gets a copy."""
    pending: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif not isinstance(node, ast.Call) and not isinstance(getattr(node, "slice", None), ast.Slice):
            pending += ast.iter_child_nodes(node)


def _derived(nodes: list[ast.AST], names: set[str], first_line: int) -> set[str]:
    """`names`, and those that are made of them. What a call made of them before the first line is a copy."""
    found, size = set(names), 0
    while size != len(found):
        size = len(found)
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    made = {name for target in targets for name in names_in(target)}
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    made = names_in(target)
                case ast.NamedExpr(target=target, value=value) | ast.AugAssign(target=target, value=value):
                    made = names_in(target)
                case ast.For(target=target, iter=value) if node.lineno > first_line:
                    made = names_in(target)
                case _:
                    continue
            is_copy = isinstance(value, ast.Call) and node.lineno < first_line
            if not is_copy and names_in(value) & found:
                found |= made
    return found


def names_in(node: ast.AST, *, with_index: bool = True) -> set[str]:
    """The names in an expression; without those of an index: `i` of `want[i]`."""
    found = set[str]()
    pending: list[ast.AST] = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, ast.Name):
            found.add(each.id)
        if isinstance(each, ast.Subscript) and not isinstance(each.slice, ast.Slice) and not with_index:
            pending.append(each.value)
        else:
            pending += ast.iter_child_nodes(each)
    return found


def holders(nodes: list[ast.AST], names: Iterable[str]) -> dict[str, str]:
    """The names that may be of classes, and what holds an object of one: by text, which one."""
    holds = {name: name for name in names if name[0].isupper()}
    for node in nodes:
        if isinstance(node, ast.Assign) and (name := maker(node.value)) in holds:
            holds.update((ast.unparse(target), name) for target in node.targets)
    return holds


def maker(node: ast.AST) -> str:
    """The name that is called in an expression."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
