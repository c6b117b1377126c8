"""Objects named by text."""

from __future__ import annotations

import pytest

from millrace.config.objects import find_object
from millrace.core.errors import ConfigError, WorkerError


def test_an_object_comes_with_its_module() -> None:
    found, module = find_object("millrace.core.errors:ConfigError", "`key`")
    assert found is ConfigError
    assert module.__name__ == "millrace.core.errors"


@pytest.mark.parametrize("path", ["millrace.core.errors", ":name", "module:", ""])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"`key` \('.*'\) must be `package.module:name`"):
        find_object(path, "`key`")


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(WorkerError, match=r"has no `Nothing`; it has .*find_object"):
        find_object("millrace.config.objects:Nothing", "worker target", kind=WorkerError)


def test_what_importing_raises_passes() -> None:
    with pytest.raises(ModuleNotFoundError):
        find_object("millrace.nowhere:name", "`key`")
