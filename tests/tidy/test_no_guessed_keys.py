"""A key is read as an attribute: a wrong name is an error, and not a default."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from millrace.config.schema import Config
from tests.tidy.sources import Module, calls, dotted, imports, modules

TABLES = Config.model_fields.keys() - {"model"}
"""Names that a table goes by. `model` is mostly one of torch."""
READS_CONFIG = {"millrace.config.schema.Config", "millrace.config.keys.Keys"}


def is_of_a_configuration(name: str, *, bare: bool) -> bool:
    """Whether `name` is a table, or a configuration. `bare`: `config` is one in this module."""
    *before, last = name.removeprefix("self._").split(".")
    return last in TABLES or "config" in (*before[-1:], "") or (bare and last == "config")


def guessed(module: Module) -> Iterator[str]:
    bare = any(name in READS_CONFIG for _, name in imports(module))
    for call, name in calls(module):
        if name in ("getattr", "hasattr") and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
            of = dotted(call.args[0])
            if is_of_a_configuration(of, bare=bare):
                yield f"{module.at(call)}: {name}({of}, {call.args[1].value!r})"


def test_no_key_of_a_configuration_is_guessed() -> None:
    """Take a member of the union with `isinstance`, or a property of `Keys`."""
    offenders = [line for module in modules() for line in guessed(module)]
    assert not offenders, "\n".join(offenders)


def test_a_guessed_key_is_found() -> None:
    lines = (
        "from millrace.config.schema import Config",
        'getattr(config.algorithm, "kep", None)',
        'getattr(run.config.reward, "group_wait_s", None)',
        'getattr(self._config.schedule, "mix", "")',
        'getattr(config, "seed")',
        'hasattr(algorithm, "kl")',
        'getattr(model.head, "bias", None)',
        "getattr(config.rollout, key)",
    )
    tree = ast.parse("\n".join(lines))
    module = Module("guesses", modules()[0].path, tree, len(lines))
    assert [int(line.split(":")[1]) for line in guessed(module)] == [2, 3, 4, 5, 6]
