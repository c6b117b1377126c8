"""Trajectories for people to read: prompt, completion and reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from millrace.observe.terminal import harmless

SHOWN_CHARACTERS = 2000
"""The middle of a longer text is left out: the end of a completion often has its answer."""


def clipped(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """`text`, or its two ends and the number of characters between them."""
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    head = characters // 2
    return f"{text[:head]}\n[... {left_out:,} characters ...]\n{text[len(text) - (characters - head) :]}"


def outcome_line(sample: Mapping[str, Any]) -> str:
    """A `sample` event, or a record of `look.record.views.samples_view`, in one line without its texts."""
    reward, reason, step = sample["reward"], sample["reason"], sample["trained_version"]
    parts = [f"trajectory {sample['trajectory_id']}"]
    parts.append("no reward" if reward is None else f"reward {reward:.4g}")
    parts.append(f"{sample['state']}{f' in step {step}' if step is not None else ''}")
    parts += [reason] if reason else []
    parts.append(f"{sample['num_tokens']} tokens{_ended(sample['finish'])}")
    parts += [version_range(sample["versions"])] if sample["versions"] else []
    return ", ".join(parts)


def version_range(versions: list[int]) -> str:
    first, last = min(versions), max(versions)
    return f"version {first}" if first == last else f"versions {first} to {last}"


def render_sample(sample: Mapping[str, Any]) -> Group:
    """Its outcome, prompt and completion, for a terminal."""
    completion = sample["completion"]
    if completion is None:
        completion = "(its tokens cannot be read: the model's tokenizer is not at `model.path` any more)"
    return Group(
        Text(f"\n{outcome_line(sample)}", style="bold"),
        *(_panel(title, text) for title, text in (("prompt", sample["prompt"]), ("completion", completion))),
    )


def as_markdown(sample: Mapping[str, Any]) -> str:
    """For services that show Markdown. The texts are code blocks, so nothing in them counts as markup."""
    texts = ((name, sample[name].replace("\n", "\n    ")) for name in ("prompt", "completion"))
    return "\n\n".join([outcome_line(sample), *(f"{name}:\n\n    {text}" for name, text in texts)])


def _panel(title: str, text: str) -> Panel:
    """`harmless` comes before the layout: it replaces marks without width by characters that have a width."""
    return Panel(Text(harmless(clipped(text))), title=title, title_align="left")


def _ended(finish: str | None) -> str:
    return {"stop": "", "length": ", cut at the longest", None: ", not complete"}[finish]
