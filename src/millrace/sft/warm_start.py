"""Supervised training from a file of demonstrations, so that rewards have something to reinforce."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from millrace.conversations.conversation_text import ConversationText, Message
from millrace.conversations.tokenizer import check_characters, encode, encode_prompt
from millrace.core.errors import DataError
from millrace.core.turns.end_ids import end_ids
from millrace.sft.sft_config import SupervisedConfig
from millrace.tasks.chat import as_messages, as_taken, is_messages, read_messages, tools_of
from millrace.tasks.data_files import refuse_packed
from millrace.tasks.row_lines import JsonLines, Row

LINES = 20  # of progress, at most
MESSAGES, PAIR, SHOWN = ("messages", "conversations"), ("prompt", "completion"), 40

Examples = list[tuple[list[int], list[int]]]
Texts = tuple[str, str]


def warm_start(config: SupervisedConfig, report: Any) -> None:
    """Train and save. `report` gets about twenty lines of progress."""
    from millrace.conversations.tokenizer import load_tokenizer
    from millrace.sft.supervised import SFTStep, sft

    tokenizer = load_tokenizer(config.model.path)
    ends = set() if tokenizer.eos_token_id is None else end_ids(config.model.path, tokenizer)
    examples = read_examples(Path(config.data.path), tokenizer, append_eos=config.data.append_eos, ends=ends)
    every = max(1, config.steps // LINES)

    def on_step(step: SFTStep) -> None:
        if (step.step + 1) % every == 0 or step.step + 1 == config.steps:
            speed = step.tokens / step.step_s
            report(f"step {step.step + 1}/{config.steps}  loss {step.loss:.4f}  {speed:,.0f} tokens/s")

    sft(
        config.model.path,
        examples,
        out_dir=config.model.out,
        steps=config.steps,
        lr=config.lr,
        batch_tokens=config.batch_tokens,
        optimizer=config.optimizer,
        row_tokens=config.token_budget,
        seed=config.seed,
        device=config.model.device,
        on_step=on_step,
    )


def read_examples(path: Path, tokenizer: Any, *, append_eos: bool, ends: Collection[int] = ()) -> Examples:
    """Token ids of each line's prompt and completion. Of chat messages, each turn of the assistant is a
    completion, up to its end.

    They are tokenized apart, as in training with rewards: the completion's tokens never depend on how
    the prompt ends.

    Args:
        ends: token ids that end a turn.
    Raises: DataError naming the line.
    """
    if not path.is_file():
        raise DataError(f"`data.path` ({path}) is not a file")
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "`data.append_eos` is true, but the tokenizer has no end-of-sequence token.\n"
            "  Give it one (`eos_token` in tokenizer_config.json), or set `data.append_eos` to false"
        )
    refuse_packed(path)
    end = [tokenizer.eos_token_id] if append_eos else []
    examples, rows = Examples(), JsonLines(path)
    for at in range(len(rows)):
        row, where = {key: as_messages(one) for key, one in rows[at].items()}, f"{path}:{rows.place(at)}"
        if messages := _messages(row):
            for prompt, turn in _turns(row, *messages, tokenizer, where):
                ids = encode(tokenizer, turn)
                last = max((at for at, one in enumerate(ids) if one in ends), default=-1)
                examples.append((encode(tokenizer, prompt), ids[: last + 1] or ids + end))
            continue
        prompt, completion = _pair(row, where)
        examples.append((encode_prompt(tokenizer, prompt), encode(tokenizer, completion) + end))
    if not examples:
        raise DataError(f"`data.path` ({path}) has no lines")
    return examples


def _messages(row: Row) -> tuple[list[Message], int] | None:
    """The chat messages of a row, and from which on they are to be learnt. None: it has texts."""
    if name := next((name for name in MESSAGES if is_messages(row.get(name))), None):
        return row[name], 1
    if not any(is_messages(row.get(name)) for name in PAIR):
        return None
    before, after = (
        [{"role": role, "content": given}] if isinstance(given, str) else given or []
        for role, given in zip(("user", "assistant"), map(row.get, PAIR), strict=True)
    )
    return before + after, len(before)


def _turns(row: Row, given: list[Message], first: int, tokenizer: Any, where: str) -> Iterator[Texts]:
    """What is before each turn of the assistant, and the turn, as the chat template writes them."""
    messages = as_taken(read_messages(given, where), tokenizer, {})
    tools, text = tools_of(row.get("tools"), f"{where}: `tools`"), ConversationText(tokenizer, {})
    turns = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
    if not turns or not turns[0]:
        raise DataError(f"{where}: the assistant has no turn behind another message, so nothing is learnt")
    for at in turns:
        try:
            before = text.checked(messages[:at], tools)
            whole = text.text(messages[: at + 1], tools, asks=False)
        except Exception as error:  # a template is a program
            raise DataError(f"{where}: {error}") from error
        why = "" if whole.startswith(before) else f"begins message {at + 1} otherwise than it asks for it"
        if tools and before == text.text(messages[:at]):
            why = "shows no tools, and the row has `tools`"
        if why:
            raise DataError(f"{where}: the chat template {why}: {before[-SHOWN:]!r}, {whole[-SHOWN:]!r}")
        yield before, whole[len(before) :]


def _pair(row: Row, where: str) -> Texts:
    if not {*PAIR} <= row.keys():
        raise DataError(
            f"{where}: a line is an object with `prompt`, `completion` or `messages`; this has {[*row]}"
        )
    if not all(isinstance(row[name], str) for name in PAIR):
        raise DataError(f"{where}: `prompt` and `completion` must be strings, or lists of chat messages")
    for name in PAIR:
        check_characters(f"{where}: the {name}", row[name])
    return row["prompt"], row["completion"]
