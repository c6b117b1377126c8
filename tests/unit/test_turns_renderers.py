"""What a bridge appends is what the bridges of the package `renderers` append: each has code for one family.

Skipped without that package: `pip install renderers httpx` (0.1.12 imports httpx, and does not require it).
Harmony's vocabulary is a file `o200k_base.tiktoken` in a folder that `TIKTOKEN_ENCODINGS_BASE` names.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.unit.chat_templates import STYLES, make_tokenizer
from tests.unit.harmony_turns import BEGIN, VocabularyTokenizer, sampled_turn

from millrace.episodes.bridge import ChatBridge
from millrace.episodes.harmony import HarmonyBridge

renderers = pytest.importorskip("renderers", reason="needs renderers: pip install renderers httpx")

CONVERSATIONS = 20
TEMPLATES = Path(__file__).parents[1] / "models" / "templates"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SPECIAL = ["<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>"]
SPECIAL += [
    f"<｜{name}｜>"
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
        *(
            f"tool▁{what}▁{end}"
            for what in ("calls", "call", "outputs", "output")
            for end in ("begin", "end")
        ),
    )
]
PARTS = ["the end", " ", "\n", "\n\n", "true", '{"found": true}', "<b>", "é→", "x" * 40, "assistant\n"]


class Family(NamedTuple):
    """`ends`: of turns. The template writes the first. `thinks`: replies begin with thinking, which the
    prompt opens if `opened`."""

    config: str
    template: str
    ends: tuple[str, ...]
    roles: tuple[str, ...] = ("user",)
    options: tuple[tuple[str, Any], ...] = ()
    thinks: bool = False
    opened: bool = False


def shipped(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


ALL = (("thinking_retention", "all"),)
TOOL = ("user", "tool")
QWEN3_ENDS = "<|im_end|>", "<|endoftext|>"
FAMILIES = {
    "qwen3": Family("Qwen3", STYLES["qwen3"].template, QWEN3_ENDS, TOOL, ALL, thinks=True),
    "qwen3, no thinking": Family(
        "Qwen3", STYLES["qwen3_no_thinking"].template, QWEN3_ENDS, TOOL, (*ALL, ("enable_thinking", False))
    ),
    "qwen3, as shipped": Family("Qwen3", shipped("qwen3"), QWEN3_ENDS, options=ALL, thinks=True),
    "llama 3": Family("Llama3", shipped("llama3"), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    "deepseek r1": Family(
        "DeepSeekR1",
        shipped("deepseek_r1"),
        ("<｜end▁of▁sentence｜>",),
        options=ALL,
        thinks=True,
        opened=True,
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), SPECIAL)


def text(rng: random.Random) -> str:
    """Without space at its ends, which some templates cut and `renderers` does not."""
    return f"a{''.join(rng.choice(PARTS) for _ in range(rng.randrange(5)))}z"


def thought(family: Family, rng: random.Random) -> str:
    if not family.thinks:
        return ""
    return f"{'' if family.opened else '<think>'}\n{text(rng)}\n</think>\n\n"


@pytest.mark.parametrize("name", FAMILIES)
def test_conversations_are_token_for_token_those_of_renderers(tokenizer: Any, name: str) -> None:
    family = FAMILIES[name]
    tokenizer.chat_template = family.template.replace("eos_token", repr(family.ends[0]))
    config = getattr(renderers, f"{family.config}RendererConfig")(**dict(family.options))
    theirs = renderers.create_renderer(tokenizer, config)
    given = {key: value for key, value in family.options if key == "enable_thinking"}
    tools = TOOLS if "tool" in family.roles else []
    ends = tokenizer.convert_tokens_to_ids(list(family.ends))
    bridge = ChatBridge(tokenizer, "user", given, tools, ends)
    for seed in range(CONVERSATIONS):
        rng = random.Random(f"{name}/{seed}")
        begin = [{"role": "user", "content": text(rng)}]
        ids = theirs.render_ids(begin, tools=tools or None, add_generation_prompt=True)
        for _ in range(rng.randrange(1, 5)):
            sampled = tokenizer.encode(thought(family, rng) + text(rng), add_special_tokens=False)
            sampled += [rng.choice(ends)] if rng.random() < 0.8 else []
            role = rng.choice(family.roles)
            answer = [{"role": role, "content": text(rng)} for _ in range(1 + 2 * (role == "tool"))]
            before = [*ids, *sampled]
            ids = [*before, *bridge.after(sampled, answer)]
            assert ids[: len(before)] == before  # what is trained is what was sampled
            assert theirs.bridge_to_next_turn(before[: -len(sampled)], sampled, answer).token_ids == ids


def test_conversations_of_harmony_are_token_for_token_those_of_renderers() -> None:
    """Their prompt opens the thinking, and they end a turn that was cut off behind `<|end|>` once more."""
    harmony = pytest.importorskip("openai_harmony", reason="needs openai-harmony")
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        pytest.skip("needs the vocabulary of harmony: TIKTOKEN_ENCODINGS_BASE names its folder")
    tokenizer = VocabularyTokenizer(harmony.load_harmony_encoding("HarmonyGptOss"))
    config = renderers.GptOssRendererConfig(thinking_retention="all", auto_drop_analysis=False)
    theirs = renderers.create_renderer(tokenizer, config)
    bridge, end = HarmonyBridge(tokenizer, "user", {}), tokenizer.added_tokens_encoder["<|end|>"]
    opened = tokenizer.encode("<|channel|>analysis<|message|>")
    for seed in range(100):
        rng = random.Random(f"harmony/{seed}")
        ids = tokenizer.encode(BEGIN)
        for _ in range(rng.randrange(1, 5)):
            sampled, _ = sampled_turn(tokenizer, rng, cut=0.3)
            role = rng.choice((*TOOL, "system"))
            answer = [
                {"role": role, "name": "look", "content": text(rng)} for _ in range(rng.randrange(1, 3))
            ]
            before = [*ids, *sampled]
            appended = bridge.after(sampled, answer)
            twice = [end] if sampled[-1] == end else []
            bridged = theirs.bridge_to_next_turn(before[: -len(sampled)], sampled, answer).token_ids
            assert bridged == [*before, *twice, *appended, *opened]
            ids = [*before, *appended]
