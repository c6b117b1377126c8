"""Completions that have other token ids when they are decoded and encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, NamedTuple

from millrace.conversations.tokenizer import encode
from text_parts.completions import TEMPERATURES, Completion

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""In a text in place of bytes that are not UTF-8."""
Ids = tuple[int, ...]


class Checked(NamedTuple):
    """`again`: the ids of its text. `behind_prompt`: whether its ids are the same behind those of its prompt,
    encoded as one text."""

    completion: Completion
    text: str
    again: list[int]
    behind_prompt: bool

    @property
    def is_same(self) -> bool:
        return self.again == self.completion.tokens


class Retokenised:
    """`ends`: ids that end a completion."""

    def __init__(self, tokenizer: Any, ends: Collection[int], completions: Sequence[Completion]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._special = frozenset(tokenizer.added_tokens_encoder.values())
        self.checked = [self._check(completion) for completion in completions]

    def _check(self, completion: Completion) -> Checked:
        prompt, tokens = completion.asked.tokens, completion.tokens
        text = self._text(tokens)
        whole = encode(self._tokenizer, self._text(prompt) + text)
        return Checked(completion, text, encode(self._tokenizer, text), whole == [*prompt, *tokens])

    def _text(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def shares(self) -> dict[str, float]:
        """Of all completions. `cut_character`: the last character is not complete. `broken_character`:
        another one is no UTF-8. Special tokens count without an end at the end."""
        broken = [one for one in self.checked if BROKEN in one.text and not one.is_same]
        inside = [one for one in broken if BROKEN in one.text.rstrip(BROKEN)]
        middle = [one.completion.tokens[:-1] for one in self.checked]
        special = [one for one in self.checked if self._num_special(one.completion.tokens[:-1])]
        spelled = [
            one
            for one in self.checked
            if self._num_special(one.again) > self._num_special(one.completion.tokens)
        ]
        counts = {
            "retokenised_share": sum(not one.is_same for one in self.checked),
            "retokenised_behind_prompt_share": sum(not one.behind_prompt for one in self.checked),
            "broken_character_share": len(inside),
            "cut_character_share": len(broken) - len(inside),
            "special_in_the_middle_share": len(special),
            "spelled_special_share": len(spelled),
            "end_in_the_middle_share": sum(any(token in self._ends for token in one) for one in middle),
        }
        return {name: count / len(self.checked) for name, count in counts.items()}

    def _num_special(self, tokens: Sequence[int]) -> int:
        return sum(token in self._special for token in tokens)

    def by_task(self) -> dict[str, dict[str, float]]:
        """The share of each task at each temperature."""
        rows: dict[str, dict[str, float]] = {}
        for task in dict.fromkeys(one.completion.asked.task for one in self.checked):
            of_task = [one for one in self.checked if one.completion.asked.task == task]
            rows[task] = {"completions": len(of_task)}
            for temperature in TEMPERATURES:
                these = [one.is_same for one in of_task if one.completion.temperature == temperature]
                rows[task][f"at {temperature}"] = 1 - sum(these) / len(these) if these else 0.0
        return rows

    @cached_property
    def pairs(self) -> Counter[tuple[Ids, Ids]]:
        """Sampled ids, and the ids in their place when their completion is encoded again."""
        counts = Counter[tuple[Ids, Ids]]()
        for one in self.checked:
            tokens = one.completion.tokens
            if one.is_same:
                continue
            for kind, i, j, k, l in SequenceMatcher(None, tokens, one.again, autojunk=False).get_opcodes():
                if kind != "equal":
                    counts[tuple(tokens[i:j]), tuple(one.again[k:l])] += 1
        return counts

    def table(self, number: int) -> list[str]:
        """The most frequent pairs as Markdown."""
        lines = ["| times | sampled ids | text | ids of the text | text |", "|---|---|---|---|---|"]
        for pair, count in self.pairs.most_common(number):
            cells = [cell for ids in pair for cell in (" ".join(map(str, ids)), self._shown(ids))]
            lines.append(f"| {count} | {' | '.join(cells)} |")
        return lines

    def _shown(self, ids: Ids) -> str:
        """The text of each id. Of one that is no whole character: its name in the vocabulary."""
        texts = [self._text([one]) for one in ids]
        names = self._tokenizer.convert_ids_to_tokens(list(ids))
        shown = [ascii(name if BROKEN in text else text) for text, name in zip(texts, names, strict=True)]
        return " ".join(f"`{one}`" for one in shown).replace("|", "&#124;")
