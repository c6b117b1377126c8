"""A long string that many completions have come to share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 40  # characters; shorter strings are phrases of any language
READ = 2_000  # characters of each end of a text

Pair = tuple[str, str]
"""A completion and its prompt. White space counts as one blank."""


@dataclass(frozen=True, slots=True)
class SharedString:
    """`late`, `early` and `unpaid`: the shares of these completions that have it, or its rarest window."""

    string: str
    late: float
    early: float
    unpaid: float


def shared(late: Sequence[Pair], early: Sequence[Pair], unpaid: Sequence[Pair], least: float) -> SharedString:
    """Of the windows of `WINDOW` characters that at least the share `least` of `late` has, the one that is
    the rarest in `early`, and as much around it as is shared so. What a completion repeats of its own prompt
    does not count.

    Degenerate:
        No such window -> an empty string, shares of 0.
    """
    texts = [_read(pair) for pair in late]
    counts = _counts(texts)
    common = {window for window, num in counts.items() if num >= least * len(texts)}
    if not common:
        return SharedString("", 0.0, 0.0, 0.0)
    before, other = (_counts([_read(pair) for pair in pairs], common) for pairs in (early, unpaid))
    best = min(common, key=lambda window: (before[window], -counts[window], window))
    example = next(completion for completion, prompt in texts if best in completion and best not in prompt)
    return SharedString(
        _extended(best, example, common),
        late=counts[best] / len(late),
        early=before[best] / max(1, len(early)),
        unpaid=other[best] / max(1, len(unpaid)),
    )


def _counts(texts: Sequence[Pair], only: set[str] | None = None) -> Counter[str]:
    """For each window the number of completions that have it, and whose prompt has not."""
    counts = Counter[str]()
    for completion, prompt in texts:
        windows = {completion[at : at + WINDOW] for at in range(len(completion) - WINDOW + 1)}
        counts.update(window for window in windows if (not only or window in only) and window not in prompt)
    return counts


def _extended(window: str, text: str, common: set[str]) -> str:
    """The longest part of `text` around `window` whose every window is common."""
    first = last = text.index(window)
    while first > 0 and text[first - 1 : first - 1 + WINDOW] in common:
        first -= 1
    while last + WINDOW < len(text) and text[last + 1 : last + 1 + WINDOW] in common:
        last += 1
    return text[first : last + WINDOW]


def _read(pair: Pair) -> Pair:
    completion, prompt = (" ".join(text.split()) for text in pair)
    ends = completion if len(completion) <= 2 * READ else completion[:READ] + completion[-READ:]
    return ends, prompt
