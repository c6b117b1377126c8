"""Makes a Score of a reward function's result or exception, and says how long to wait before an attempt is
repeated. A failure never becomes a zero.
"""

from __future__ import annotations

import linecache
import math
import traceback
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Real
from random import Random
from typing import Any

import numpy as np

from millrace.conversations.encoding import encodable
from millrace.core.types import Abstain, Failed, Score, Scored

SHOWN_CHARACTERS = 200
REWARD_MAX = 1e16
"""The largest size of a reward. Advantages and losses are float32, in which the squares of three million such
rewards still have a finite sum."""


def to_score(name: str, returned: Any) -> Score:
    """Judge a returned value: a number (or bool), a dict with `reward` and metrics, or None.

    None, alone or as the `reward` of a dict, abstains. Anything else fails, naming function and value.
    Of the other keys of a dict, finite numbers are metrics. Other values, such as text, are left out.
    """
    if returned is None:
        return Abstain(f"{name} returned None")
    if not isinstance(returned, Mapping):
        value = _reward(returned)
        return Scored(value) if value is not None else _refused(name, "returned", returned)
    if "reward" not in returned:
        keys = _shown(sorted(map(str, returned)))
        return Failed(f"{name} returned a dict without the key 'reward': its keys are {keys}")
    if returned["reward"] is None:
        return Abstain(f"{name} returned a reward of None")
    reward = _reward(returned["reward"])
    if reward is None:
        return _refused(name, "returned, under the key 'reward',", returned["reward"])
    others = ((encodable(str(key)), finite(value)) for key, value in returned.items() if key != "reward")
    return Scored(reward, {key: value for key, value in others if value is not None})


def raised(name: str, error: BaseException, file: str | None = None) -> Failed:
    """The failure of an exception: its type, its message and the line that raised it.

    The line is the innermost one in `file` (the user's), or the innermost of all.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename == file] or list(frames)
    where = ""
    if ours:
        line = (ours[-1].line or linecache.getline(ours[-1].filename, ours[-1].lineno or 0)).strip()
        where = f" at {ours[-1].filename}:{ours[-1].lineno} `{line}`"
    return Failed(f"{name} raised {type(error).__name__}: {shortened(error)}{where}")


def finite(value: Any) -> float | None:
    """A finite float, or None. NumPy scalars are numbers, as are arrays and tensors without dimensions, of
    any library; strings are not."""
    try:
        if getattr(value, "shape", None) == () and not isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (Real, Decimal, np.bool_)):
            return None
        number = float(value)
    except Exception:  # a number too large for a float, or an object that is no number
        return None
    return number if math.isfinite(number) else None


def _reward(value: Any) -> float | None:
    number = finite(value)
    return number if number is not None and abs(number) <= REWARD_MAX else None


def _refused(name: str, how: str, value: Any) -> Failed:
    return Failed(
        f"{name} {how} {_shown(value)} ({type(value).__name__}): a reward function returns a number from "
        f"-{REWARD_MAX:g} to {REWARD_MAX:g}, a dict of numbers with the key 'reward', or None"
    )


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"a value that cannot be shown ({type(error).__name__})"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def shortened(error: BaseException) -> str:
    """The message of an error, shortened, with printable characters."""
    try:
        return encodable(str(error)[:SHOWN_CHARACTERS])
    except Exception as broken:
        return f"(its message cannot be shown: {type(broken).__name__})"


# ---------------------------------------------------------------- pauses


PAUSE_S_MAX = 60.0


def pauses_s(key: str, attempts: int, backoff_s: float) -> Iterator[float]:
    """The pauses between `attempts`, in seconds. They double up to `PAUSE_S_MAX`, with jitter of half their
    size, which depends on `key` alone."""
    jitter = Random(key.encode(errors="replace"))
    for doubled in range(attempts - 1):
        yield min(backoff_s * 2**doubled * jitter.uniform(0.5, 1.5), PAUSE_S_MAX)
