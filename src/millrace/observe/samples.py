"""Trajectories for people to read: prompt, completion and reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from millrace.observe.conversation import CAUSES
from millrace.observe.terminal import harmless

UNREADABLE = "(its tokens cannot be read: the model's tokenizer is not at `model.path` any more)"
SHOWN_CHARACTERS = 2000
"""The middle of a longer text is left out: the end of a completion often has its answer."""

_TITLE = "turn", "role", "tokens", "versions", "reward", "after", "sequence", "causes"


def clipped(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """`text`, or its two ends and the number of characters between them."""
    left_out = len(text) - characters
    if left_out <= 0:
        return text
    head = characters // 2
    return f"{text[:head]}\n[... {left_out:,} characters ...]\n{text[len(text) - (characters - head) :]}"


def outcome_line(sample: Mapping[str, Any]) -> str:
    """A `sample` event, or a record of `millrace show`, in one line without its texts."""
    reward, reason, step = sample["reward"], sample["reason"], sample["trained_version"]
    parts = [f"trajectory {sample['trajectory_id']}"]
    parts.append("no reward" if reward is None else f"reward {reward:.4g}")
    parts.append(f"{sample['state']}{f' in step {step}' if step is not None else ''}")
    parts += [reason] if reason else []
    turns = sample.get("turns", ())
    observed = sum(turn["tokens"] for turn in turns if not turn["versions"])
    of_these = f" ({observed} observed)" if observed else ""
    parts.append(f"{sample['num_tokens']} tokens{of_these}{_ended(sample)}")
    parts += [version_range(sample["versions"])] if sample["versions"] else []
    return ", ".join(parts)


def version_range(versions: Sequence[int]) -> str:
    first, last = min(versions), max(versions)
    return f"version {first}" if first == last else f"versions {first} to {last}"


def render_sample(sample: Mapping[str, Any], tokens: Sequence[RenderableType] = ()) -> Group:
    """Its outcome, prompt and completion, for a terminal. `tokens`: as of `panels_of`."""
    prompt = panel("prompt", clipped(sample["prompt"]))
    return Group(Text(f"\n{outcome_line(sample)}", style="bold"), prompt, *panels_of(sample, tokens))


def panels_of(
    sample: Mapping[str, Any], tokens: Sequence[RenderableType] = (), start: str = ""
) -> list[Panel]:
    """A panel of each passage. `tokens` stand in place of the texts of the first passages: of a long episode
    they may have less. `start` begins the titles, and takes the place of the title of a single completion."""
    panels = []
    for index, (name, text) in enumerate(passages_of(sample)):
        title = name if not start else start if name == "completion" else f"{start}, {name}"
        if text is not None and index < len(tokens):
            panels.append(Panel(tokens[index], title=harmless(title), title_align="left"))
        else:
            panels.append(panel(title, UNREADABLE if text is None else clipped(text)))
    return panels


def passages_of(sample: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """(title, text) of the completion, or of each turn of an episode. None: there is no tokenizer."""
    if turns := sample.get("turns"):
        return [(turn_title(**{name: turn[name] for name in _TITLE}), turn["text"]) for turn in turns]
    return [("completion", sample["completion"])]


def turn_title(
    *,
    turn: int,
    role: str,
    tokens: int,
    versions: Sequence[int],
    reward: float | None,
    after: int | None,
    sequence: int = 1,
    causes: Sequence[str] = (),
) -> str:
    """Who wrote a turn of an episode, how long it is, what it earned, and why it begins which sequence."""
    parts = [f"{role} {turn}: {tokens} tokens", version_range(versions) if versions else "observed"]
    if after is not None:
        place = f", follows turn {after}" if after else ", in place of the prompt"
        why = f" ({' or '.join(CAUSES[cause] for cause in causes)})" if causes else place
        parts.append(f"sequence {sequence}{why}")
    return ", ".join([*parts, *([] if reward is None else [f"reward {reward:.4g}"])])


def transcript(sample: Mapping[str, Any]) -> str:
    """The completion as one text. In an episode each turn begins with its role."""
    if turns := sample.get("turns"):
        return "\n".join(f"{turn['role']}: {turn['text']}" for turn in turns)
    return str(sample["completion"])


def as_markdown(sample: Mapping[str, Any]) -> str:
    """For services that show Markdown. The texts are code blocks, so nothing in them counts as markup."""
    passages = [("prompt", sample["prompt"]), *passages_of(sample)]
    texts = ((name, str(text).replace("\n", "\n    ")) for name, text in passages)
    return "\n\n".join([outcome_line(sample), *(f"{name}:\n\n    {text}" for name, text in texts)])


def panel(title: str, text: str) -> Panel:
    """`harmless` comes before the layout: it replaces marks without width by characters that have a width."""
    return Panel(Text(harmless(text)), title=title, title_align="left")


def _ended(sample: Mapping[str, Any]) -> str:
    if budget := sample.get("ended_by"):
        return f", ended by the budget of {budget}"
    words = {"stop": "", "length": ", cut at the longest", None: ", not complete"}
    return words.get(sample["finish"], ", not answered")
