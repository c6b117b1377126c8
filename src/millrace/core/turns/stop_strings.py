"""Stop strings, found in decoded text as soon as the engine samples the token that completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens before the stop string that the window keeps, so that a character split over tokens or a
# tokenizer's treatment of the first token cannot hide a match.
_MARGIN = 4


class StopStrings:
    """Whether a completion ends with a stop string in it, as a pure function of its tokens.

    A token stands for at least one byte. So the last (longest stop string in bytes + margin) tokens contain
    any new match. Only the ids that pad a model's vocabulary stand for nothing: then the window is longer.
    """

    def __init__(self, decode: Callable[[list[int]], str], strings: Sequence[str]) -> None:
        self._decode, self._strings = decode, tuple(strings)
        self._window = max(len(string.encode()) for string in strings) + _MARGIN

    def hit(self, tokens: Sequence[int]) -> bool:
        """True if the newest token completed a stop string."""
        window = self._window
        while window < len(tokens) and self._num_bytes(tokens[-window:-1]) < self._window - 1:
            window *= 2
        text = self._decode(list(tokens[-window:]))
        return any(string in text for string in self._strings)

    def _num_bytes(self, tokens: Sequence[int]) -> int:
        return len(self._decode(list(tokens)).encode(errors="replace"))


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and which one it is; empty: there is none."""
    at, found = min(((text.find(one), one) for one in stop if one in text), default=(len(text), ""))
    return text[:at], found
