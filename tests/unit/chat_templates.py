"""Chat templates in the style of model families, and a tokenizer that knows their special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from millrace.conversations.tokenizer import load_tokenizer


class Style(NamedTuple):
    """`end`: the token that ends a turn. `roles`: of observations. `exact`: the whole conversation, rendered
    again, is what the model saw; others drop thinking, or add space before a reply. `ends`: other tokens that
    end a turn."""

    template: str
    end: str
    roles: tuple[str, ...] = ("user",)
    exact: bool = True
    ends: tuple[str, ...] = ()


def _each(body: str, prompt: str, before: str = "") -> str:
    return (
        f"{before}{{% for m in messages %}}{body}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


CHATML = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
TOOL_LIST = "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
RESPONSE = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}"
)
THOUGHT = (
    "{% set text = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}"
)
QWEN3 = (
    RESPONSE + THOUGHT + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + text + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endif %}{% endif %}"
)
LLAMA3_HEAD = "{{ '<|start_header_id|>' + (%s) + '<|end_header_id|>\\n\\n' }}"
LLAMA3_ENDS = "<|eom_id|>", "<|end_of_text|>"
LLAMA3_PROMPT = LLAMA3_HEAD % "'assistant'"
DEEPSEEK = (
    "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end_of_sentence|>' }}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|outputs_begin|>' }}{% endif %}"
    "{{ '<|output|>' + m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|outputs_end|>' }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}"
)
PLAIN_ROLES = "{{ ('USER: ' if m.role == 'user' else 'ASSISTANT: ') + m.content }}"
TULU = (
    "{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content + eos_token }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}"
)
MISTRAL = (
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + (m.content | tojson) + ', \"id\": \"' + m.tool_call_id + '\"}' }}"
    "{{ '[/TOOL_RESULTS]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}"
)
ALTERNATING = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
)
TOOL = ("user", "tool")

HARMONY = (
    "{{ '<|start|>system<|message|>Help.<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|start|>' + m.role }}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' + (f.arguments | tojson) }}"
    "{% elif m.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
    "{{ '<|message|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_TOKENS = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"
"""Of harmony, beside `<|end|>`."""

STYLES = {
    "chatml": Style(_each(CHATML, "{{ '<|im_start|>assistant\\n' }}"), "<|im_end|>", TOOL),
    "chatml_system": Style(
        _each(
            CHATML,
            "{{ '<|im_start|>assistant\\n' }}",
            "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}",
        ),
        "<|im_end|>",
    ),
    "hermes_tools": Style(
        _each(RESPONSE + CHATML + "{% endif %}", "{{ '<|im_start|>assistant\\n' }}", TOOL_LIST),
        "<|im_end|>",
        TOOL,
    ),
    "qwen3": Style(_each(QWEN3, "{{ '<|im_start|>assistant\\n' }}", TOOL_LIST), "<|im_end|>", TOOL, False),
    "qwen3_no_thinking": Style(
        _each(QWEN3, "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}", TOOL_LIST),
        "<|im_end|>",
        TOOL,
        False,
    ),
    "qwen3_begins_thinking": Style(
        _each(QWEN3, "{{ '<|im_start|>assistant\\n<think>\\n' }}", TOOL_LIST), "<|im_end|>", TOOL, False
    ),
    "llama3": Style(
        _each(
            LLAMA3_HEAD % "m.role" + "{{ m.content | trim + '<|eot_id|>' }}", LLAMA3_PROMPT, "{{ bos_token }}"
        ),
        "<|eot_id|>",
        TOOL,
        ends=LLAMA3_ENDS,
    ),
    "llama3_tools": Style(
        _each(
            LLAMA3_HEAD % "'ipython' if m.role == 'tool' else m.role"
            + "{{ (m.content | tojson) if m.role == 'tool' else (m.content | trim) }}{{ '<|eot_id|>' }}",
            LLAMA3_PROMPT,
            "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}",
        ),
        "<|eot_id|>",
        TOOL,
        ends=LLAMA3_ENDS,
    ),
    "gemma": Style(
        _each(
            ALTERNATING + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
            "{{ m.content | trim + '<end_of_turn>\\n' }}",
            "{{ '<start_of_turn>model\\n' }}",
            "{{ bos_token }}",
        ),
        "<end_of_turn>",
    ),
    "mistral": Style(_each(ALTERNATING + MISTRAL, "", "{{ bos_token }}"), "</s>", exact=False),
    "mistral_results": Style(_each(MISTRAL, "", "{{ bos_token }}"), "</s>", TOOL, False),
    "deepseek": Style(
        _each(
            DEEPSEEK,
            "{% if messages[-1].role != 'tool' %}{{ '<|Assistant|>' }}{% endif %}",
            "{{ bos_token }}",
        ),
        "<|end_of_sentence|>",
    ),
    "deepseek_tools": Style(
        _each(DEEPSEEK, "{{ '<|Assistant|>' }}", "{{ bos_token }}"), "<|end_of_sentence|>", TOOL, True
    ),
    "deepseek_begins_thinking": Style(
        _each(DEEPSEEK, "{{ '<|Assistant|><think>\\n' }}", "{{ bos_token }}"),
        "<|end_of_sentence|>",
        TOOL,
        False,
    ),
    "zephyr": Style(
        _each("{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}", "{{ '<|assistant|>' }}"),
        "</s>",
        TOOL,
        False,
    ),
    "phi3": Style(
        _each("{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}", "{{ '<|assistant|>\\n' }}"),
        "<|end|>",
        TOOL,
    ),
    "phi4": Style(
        _each(
            "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}",
            "{{ '<|im_start|>assistant<|im_sep|>' }}",
        ),
        "<|im_end|>",
        TOOL,
    ),
    "command": Style(
        _each(
            "{{ '<|turn_begin|>' + ('<|bot|>' if m.role == 'assistant' else '<|' + m.role + '|>') }}"
            "{{ m.content | trim + '<|turn_end|>' }}",
            "{{ '<|turn_begin|><|bot|>' }}",
            "{{ bos_token }}",
        ),
        "<|turn_end|>",
        TOOL,
    ),
    "glm": Style(
        _each(
            "{{ ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\\n' + m.content }}",
            "{{ '<|assistant|>\\n' }}",
            "[gMASK]<sop>",
        ),
        "<|observation|>",
        ("tool",),
    ),
    "granite": Style(
        _each(
            "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}",
            "{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
        ),
        "<|end_of_text|>",
        TOOL,
    ),
    "tulu": Style(_each(TULU, "{{ '<|assistant|>\\n' }}", "{{ bos_token }}"), "</s>"),
    "vicuna": Style(
        _each(PLAIN_ROLES + "{{ '</s>' if m.role == 'assistant' else ' ' }}", "{{ 'ASSISTANT: ' }}"), "</s>"
    ),
    "alpaca": Style(
        _each(
            "{{ '### ' + ('Response' if m.role == 'assistant' else 'Instruction') + ':\\n' }}"
            "{{ m.content + '\\n\\n' }}",
            "{{ '### Response:\\n' }}",
        ),
        "</s>",
        exact=False,  # its end token is not in the template
    ),
    "begins_reasoning_in_words": Style(
        _each(
            "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}",
            "{{ '<|assistant|>\nThis is how I reason:\n' }}",
        ),
        "<|end|>",
        TOOL,
        False,
    ),
    "reply_behind_recipient": Style(
        _each(
            LLAMA3_HEAD % "m.role" + "{{ ('>>>all\n' if m.role == 'assistant' else '') + m.content }}"
            "{{ '<|eot_id|>' }}",
            LLAMA3_PROMPT + "{{ '>>>' }}",
        ),
        "<|eot_id|>",
        TOOL,
        False,
    ),
    "space_behind_results": Style(
        _each(
            "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
            "{{ '\\n' if m.role == 'tool' and not loop.last }}{{ '<|im_end|>\\n' }}",
            "{{ '<|im_start|>assistant\n' }}",
        ),
        "<|im_end|>",
        TOOL,
        False,
    ),
    "falcon": Style(
        _each(
            "{{ ('\\n' if not loop.first else '') + m.role.title() + ': ' + m.content }}",
            "{{ '\\nAssistant: ' }}",
        ),
        "</s>",
        TOOL,
        False,
    ),
}
REFUSED = {
    "numbers_messages": _each("{{ loop.index ~ '/' ~ (messages | length) + m.content }}", ""),
    "shows_the_last_message": "{{ messages[-1].role + ': ' + messages[-1].content }}",
    "moves_the_system_text": _each("{{ ('Help. ' if loop.last else '') + m.role + m.content + '</s>' }}", ""),
    "cuts_earlier_replies": _each(
        "{{ m.role + (m.content if loop.last else m.content[:3]) + '</s>' }}", "{{ 'assistant' }}"
    ),
    "counts_turns": _each("{{ m.role + m.content }}", "{{ 'turn ' ~ (messages | length) }}"),
    "changes_the_question_behind_a_reply": _each(
        "{{ ('old ' if not loop.last else '') + m.role + m.content + '</s>' }}", "{{ 'assistant' }}"
    ),
    "fails": _each("{{ raise_exception('no') if m.role == 'assistant' }}", ""),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>", "<|outputs_begin|>", "<|output|>",
    "<|outputs_end|>",
    "<|end|>", "<|turn_begin|>", "<|turn_end|>", "<|bot|>", "<|user|>", "<|assistant|>", "<|tool|>",
    "<|observation|>", "[gMASK]", "<sop>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
]  # fmt: skip
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens of their own that are not special, as in Qwen3."""


def make_tokenizer(directory: Path, more: Sequence[str] = ()) -> Any:
    """Byte-level BPE with a few merges, so that neighbours may become one token. `more`: special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    words = "user assistant tool the true false \n\n \n name content end\n name\n\n\nend"
    backend.train_from_iterator([words] * 8, trainer)
    special = [*SPECIAL, *more]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(one, special=False, normalized=False) for one in ADDED])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=special
    )
    made.save_pretrained(str(directory))
    return load_tokenizer(directory)
