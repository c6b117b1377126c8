"""Stands in for what SGLang imports on a CPU and never calls there: kernels, which exist for CUDA alone, and
torchvision, which has no build for this torch. Python imports this file when it starts.

A class that is asked for is empty, and a function that is called is an error.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from types import ModuleType

MISSING = ("sgl_kernel", "torchvision")


class _Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Function:
    def __call__(self, *_, **__):
        raise RuntimeError("the tests have no such package, only its names")

    def __getattr__(self, name):
        return _get(name)


class _Missing(ModuleType):
    def __getattr__(self, name):
        return _get(name)


def _get(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {}) if name[0].isupper() else _Function()


class _Installed(Distribution):
    """transformers asks for the version of torchvision."""

    def read_text(self, filename):
        return "Name: torchvision\nVersion: 0.28.0\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


class _Finder(MetaPathFinder, Loader):
    def find_distributions(self, context):
        return [_Installed()] if context.name == "torchvision" else []

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in MISSING else None

    def create_module(self, spec):
        module = _Missing(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module): ...


sys.meta_path.append(_Finder())
