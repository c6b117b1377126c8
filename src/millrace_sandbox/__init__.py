"""Runs programs that a model wrote, and keeps them from everything else: docs/sandbox.md.

The class `Sandbox` is the way in. `inside/` runs in the warm process and in the programs that it forks: these
files import the standard library alone.
"""
