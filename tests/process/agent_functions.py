"""Agents for the tests of agents as functions."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

import numpy as np

imported_in = os.getpid()
num_calls = 0


def solve(row: dict[str, Any], base_url: str, key: str) -> Any:
    """Do what the row says."""
    global num_calls
    num_calls += 1
    match row["what"]:
        case "value":
            return {"row": row, "base_url": base_url, "key": key, "cwd": os.getcwd()}
        case "where":
            return [imported_in, os.getpid(), num_calls, random.random()]
        case "environment":
            return [os.environ["OPENAI_API_KEY"], os.environ.get("WORKER_SECRET")]
        case "numpy":
            return {"reward": np.float32(0.5), "each": np.arange(2)}
        case "large":
            return "x" * 100_000
        case "object":
            return object()
        case "memory":
            return len(bytearray(2**30))
    return end(row["what"])


def end(how: str) -> None:
    match how:
        case "raise":
            raise LookupError("no such tool")
        case "raise with a note":
            error = LookupError("no such tool")
            error.add_note("During task with name 'model'")  # as LangGraph does
            raise error
        case "exit":
            sys.exit(7)
        case "exit in words":
            sys.exit("the tool is broken")
        case "_exit":
            print("before the end")
            os._exit(9)
        case "fork":
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(100)
            print(child)
        case "sleep":
            time.sleep(100)


async def think(row: dict[str, Any], key: str) -> str:
    await asyncio.sleep(0)
    return f"{row['what']} {key}"


def asks_for_more(row: dict[str, Any], model: str) -> None: ...
