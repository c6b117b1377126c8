"""What the code never does: look at real time, draw unseeded, start tasks without an owner, print."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.sources import Module, calls, dotted, imports, modules

CONTROL_PLANE = ("core", "schedule", "ledger", "controller", "millrace_sim")
CLOCK = "millrace.core.clock"
BANNED_MODULES = {"time", "threading", "socket", "uuid", "secrets", "multiprocessing"}
BANNED_CALLS = (
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "date.today",
    "os.urandom",
    "os.getrandom",
)
OWNERLESS = ("ensure_future", "get_event_loop", "run_coroutine_threadsafe")
OWNS_ITS_TASKS = {
    "millrace_sim.virtual.workers": "a simulated worker's tasks end with it, as a process's would",
}


def test_the_control_plane_uses_no_real_time_threads_or_sockets() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        if module.layer in CONTROL_PLANE and module.name != CLOCK
        for node, name in [*imports(module), *calls(module)]
        if (isinstance(node, ast.Import | ast.ImportFrom) and name.split(".")[0] in BANNED_MODULES)
        or (isinstance(node, ast.Call) and name.endswith(BANNED_CALLS))
    ]
    assert not offenders, "\n".join(offenders)


def test_text_reaches_a_terminal_through_the_one_console_that_renders_it_harmless() -> None:
    offenders = [
        f"{module.at(call)}: {name}"
        for module in modules()
        if module.name != "millrace.observe.terminal"
        for call, name in calls(module)
        if name in ("Console", "rich.console.Console", "rich.print")
    ]
    assert not offenders, "\n".join(offenders)


def test_the_control_plane_draws_from_seeded_generators_only() -> None:
    offenders = [
        f"{module.at(node)}: {what}"
        for module in modules()
        if module.layer in CONTROL_PLANE
        for node, what in unseeded(module)
    ]
    assert not offenders, "\n".join(offenders)


def unseeded(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Uses of `random` other than the class `random.Random` with a seed."""
    for node, name in imports(module):
        if name.startswith("random.") and name != "random.Random":
            yield node, name
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and dotted(node).startswith("random.") and node.attr != "Random":
            yield node, dotted(node)
        if isinstance(node, ast.Call) and dotted(node.func) in ("random.Random", "Random") and not node.args:
            yield node, "Random() without a seed"


def test_every_task_has_a_task_group_as_its_owner() -> None:
    offenders = []
    for module in modules():
        groups = task_groups(module)
        for call, name in calls(module):
            owner, _, method = name.rpartition(".")
            bare = method == "create_task" and owner.rpartition(".")[2] not in groups
            bare |= name == "asyncio.gather"  # one that fails leaves the others without an owner
            if (bare and module.name not in OWNS_ITS_TASKS) or method in OWNERLESS:
                offenders.append(f"{module.at(call)}: {name}")
    assert not offenders, "\n".join(offenders)


def task_groups(module: Module) -> set[str]:
    """Names in `module` that are bound to an `asyncio.TaskGroup`, and attributes set from them."""
    names: set[str] = set()
    for node in module.nodes:
        match node:
            case ast.withitem(context_expr=ast.Call(func=made), optional_vars=ast.AST() as bound):
                if dotted(made).endswith("TaskGroup"):
                    names.add(dotted(bound).rpartition(".")[2])
            case ast.arg(annotation=ast.AST() as kind) if dotted(kind).endswith("TaskGroup"):
                names.add(node.arg)
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            names |= set(bound_attributes(node, names))
    return names


def bound_attributes(node: ast.Assign, names: set[str]) -> Iterator[str]:
    """Attributes that `node` sets from one of `names`; also in `self.a, self.b = a, b`."""
    for target in node.targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=False))
        for left, right in pairs:
            if isinstance(left, ast.Attribute) and isinstance(right, ast.Name) and right.id in names:
                yield left.attr


def test_only_the_command_line_prints() -> None:
    offenders = [
        module.at(call)
        for module in modules()
        if module.layer != "cli" and ".command" not in module.name
        for call, name in calls(module)
        if name == "print"
    ]
    assert not offenders, "\n".join(offenders)
