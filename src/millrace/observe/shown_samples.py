"""Trajectories and groups for people to read: prompts, completions and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from millrace.observe.conversation_times import CAUSES, PROMPT
from millrace.observe.terminal import harmless, sparkline

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
    if role == PROMPT:
        return f"the end of its own prompt: {tokens} tokens"
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


METRICS_MAX = 6
"""The most own metrics that have a column. `--json` has all of them."""
NO_TOKENS: Mapping[int, Sequence[RenderableType]] = MappingProxyType({})


def render_group(
    view: Mapping[str, Any], tokens: Mapping[int, Sequence[RenderableType]] = NO_TOKENS
) -> Group:
    """A record of `look.record.group.group_view`. `tokens` of trajectories, by id: as of `panels_of`."""
    attempts = view["attempts"]
    states = ", ".join(f"{num} {state}" for state, num in view["states"].items())
    parts: list[RenderableType] = [
        Text(harmless(f"\ngroup {view['group_id']}, row {view['row_id']}, {states}"), style="bold"),
        panel("prompt", clipped(view["prompt"])),
    ]
    if view["answer"] is not None:
        parts.append(panel("reference answer", view["answer"]))
    columns = view["columns"].items()
    parts += [_table("Other columns of the row", ["column", "value"], columns)] if columns else []
    parts.append(_attempts(attempts))
    notes = (view[f"{what}_unknown"] for what in ("columns", "advantages", "ratios"))
    parts += [Text(harmless(note), style="dim") for note in notes if note]
    for one in attempts:
        title = f"trajectory {one['trajectory_id']}, {_earned(one)}"
        parts += panels_of(one, tokens.get(one["trajectory_id"], ()), title)
    return Group(*parts, *_history(view["history"], view["group_id"]))


def _attempts(attempts: Sequence[Mapping[str, Any]]) -> Group:
    names = list(dict.fromkeys(name for one in attempts for name in one["metrics"]))[:METRICS_MAX]
    head = ["id", "reward", "advantage", "tokens", "ended by", "state", "versions", *names]
    rows = [
        (
            one["trajectory_id"],
            one["reward"],
            _advantage(one),
            one["num_tokens"],
            one["finish"],
            f"{one['state']}: {one['reason']}" if one["reason"] else one["state"],
            _range(one["versions"]),
            *(one["metrics"].get(name) for name in names),
        )
        for one in attempts
    ]
    return _table("Attempts", head, rows)


def _history(history: Mapping[str, Any], group_id: int) -> list[RenderableType]:
    """Each draw of the row, the newest first."""
    draws, first = history["draws"], history["looked_back_to_group"]
    head = ["group", "trained into", "sampled by", "mean reward", "mean tokens", "longest", "states"]
    rows = [
        (
            f"{draw['group_id']} (this)" if draw["group_id"] == group_id else draw["group_id"],
            ", ".join(map(str, draw["trained"])),
            _range(draw["sampled"] or ()),
            draw["reward_mean"],
            draw["tokens_mean"],
            draw["tokens_max"],
            f"skipped: {draw['skipped']}"
            if draw["skipped"]
            else ", ".join(f"{num} {state}" for state, num in draw["states"]),
        )
        for draw in draws
    ]
    parts: list[RenderableType] = [_table("The row over the run", head, rows)]
    rewards = [draw["reward_mean"] for draw in reversed(draws) if draw["reward_mean"] is not None]
    if len(rewards) > 1:
        line = (
            f"mean reward, the oldest first: {sparkline(rewards)} ({min(rewards):.3g} to {max(rewards):.3g})"
        )
        parts.append(Text(line))
    if first:
        parts.append(Text(f"Only groups from {first:,} on were looked at.", style="dim"))
    return parts


def _earned(one: Mapping[str, Any]) -> str:
    reward = "no reward" if one["reward"] is None else f"reward {one['reward']:.4g}"
    advantage = _advantage(one)
    return f"{reward}, advantage {advantage}" if advantage else reward


def _advantage(one: Mapping[str, Any]) -> str:
    return "not trained" if one["masked"] else ", ".join(f"{value:.3g}" for value in one["advantages"])


def _range(versions: Sequence[int]) -> str:
    if not versions:
        return ""
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Group:
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(harmless(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(_written(value)) for value in row))
    return Group(Text(f"\n{title}", style="bold"), table)


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value in (None, "") else harmless(str(value))
