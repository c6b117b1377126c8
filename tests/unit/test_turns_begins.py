"""What the begin of a conversation says holds in every turn, for templates that look back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.call_templates import SAY
from tests.unit.test_conversations_template_texts import SWITCH
from tests.unit.test_turns_forms import Play, model

__all__ = ["model"]

OWN = """
    class Own:
        recovery = "RECOVERY"

        def reset(self, row):
            row["prompt"] = "taken"
            return BEGUN

        def step(self, action):
            return Observation([{"role": "user", "content": "again"}])

        def snapshot(self):
            return b""

        def restore(self, row, snapshot):
            pass
"""
OF_SYSTEM = (
    "{% set off = messages[0].role == 'system' and '/no_think' in messages[0].content %}"
    "{% for m in messages %}" + SAY + "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if off %}<think></think>{% endif %}{% endif %}"
)
MOVES = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The text of the system stands in the last question."""

SYSTEM, ASK = {"role": "system", "content": "Be brief. /no_think"}, {"role": "user", "content": "2*3="}
SHOWN = [ASK, {"role": "assistant", "content": "6"}, {"role": "user", "content": "2*4= /no_think"}]


def play(model: Path, directory: Path, template: str, chat: Any, *, begun: Any = None, **more: str) -> Play:
    directory.mkdir(exist_ok=True)
    code = more.get("code", OWN).replace("BEGUN", repr(begun))
    code = code.replace("RECOVERY", more.get("recovery", "replayed"))
    return Play(model, directory, code, template=template, chat=chat)


@pytest.mark.parametrize(
    ("template", "chat", "begun"),
    [
        (SWITCH, [SYSTEM, ASK], None),
        (OF_SYSTEM, [SYSTEM, ASK], None),
        (SWITCH, SHOWN, None),
        (SWITCH, [ASK], " /no_think"),
        (SWITCH, [ASK], [{"role": "user", "content": "/no_think"}]),
        (SWITCH, [ASK], None),
    ],
    ids=["system", "only of the system", "question", "begun", "begun with messages", "none"],
)
@pytest.mark.parametrize("recovery", ["replayed", "restored"])
def test_a_switch_of_the_begin_holds_in_every_turn(
    model: Path, tmp_path: Path, template: str, chat: Any, begun: Any, recovery: str
) -> None:
    some = play(model, tmp_path / "one", template, chat, begun=begun, recovery=recovery)
    prompt = some.prompt().text  # type: ignore[union-attr]
    begin = prompt.rpartition("<|assistant|>")[2]
    follows = f"<|user|>again<|end|><|assistant|>{begin}"
    assert begin == ("<think></think>" if "/no_think" in f"{chat}{begun}" else "")
    assert some.text(some.act("5")) == some.text(some.act("7")) == follows
    other = play(model, tmp_path / "two", template, chat, begun=begun, recovery=recovery)
    if recovery == "replayed":  # another worker repeats the episode
        other.tokens, other.turns = some.tokens, some.turns
        assert other.text(other.act("8")) == follows


@pytest.mark.parametrize("text", ["/no_think", [{"role": "system", "content": "/no_think"}]])
def test_a_new_prompt_has_its_own_switch(model: Path, tmp_path: Path, text: Any) -> None:
    code = OWN.replace("return Obs", f'return Observation({text!r}, after=0) if "n" in action else Obs')
    some = play(model, tmp_path, SWITCH, [ASK], code=code)
    assert some.text(some.act("5")).endswith("<|assistant|>")
    assert some.text(some.act("new")).endswith("<|assistant|><think></think>")
    assert some.text(some.act("5")) == "<|user|>again<|end|><|assistant|><think></think>"


def test_a_template_that_moves_the_text_of_the_system_appends_as_without_one(
    model: Path, tmp_path: Path
) -> None:
    some = play(model, tmp_path, MOVES, [SYSTEM, ASK])
    assert some.text(some.act("5")) == some.text(some.act("7")) == "<|user|>again<|end|><|assistant|>"
