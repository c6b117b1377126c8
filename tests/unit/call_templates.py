"""Small chat templates that write calls of tools as model families do, and the bare call of each."""

from __future__ import annotations

from typing import Any

SHOWN = "{% if tools %}<|user|>{{ tools | tojson }}<|end|>{% endif %}"
SAY = "{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ITEMS = "{% for k, v in f.arguments.items() %}"
RAW = "{{ v if v is string else v | tojson }}"


def writes(call: str, before: str = "", after: str = "", between: str = "", only: str = "") -> str:
    """A template that shows tools, and writes calls. `only`: Jinja in front of them."""
    joined = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    calls = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}{joined}{{% endfor %}}"
    written = f"{{% if m.tool_calls %}}{only}{before}{calls}{after}{{% endif %}}"
    return f"{SHOWN}{{% for m in messages %}}{SAY}{written}<|end|>{{% endfor %}}{ASK}"


TAGGED = '<parameter name="{{ k }}">' + RAW + "</parameter>\n{% endfor %}"
PYTHON = "{% if not loop.last %}, {% endif %}{% endfor %})"
ONE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
NINE = "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

FAMILIES = {
    "Hermes, Qwen 2.5 and 3": writes(
        '<tool_call>\n{{ {"name": f.name, "arguments": f.arguments} | tojson }}\n</tool_call>', between="\n"
    ),
    "Qwen3-Coder, Qwen 3.5": writes(
        "<tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>\n" + RAW + "\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>",
        between="\n",
    ),
    "GLM-4-0414": writes("{{ f.name }}\n{{ f.arguments | tojson }}", only=ONE),
    "GLM-4.5": writes(
        "\n<tool_call>{{ f.name }}\n"
        + ITEMS
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
        + RAW
        + "</arg_value>\n{% endfor %}</tool_call>"
    ),
    "Mistral v3": writes(
        '{{ (f | tojson)[:-1] + ", \\"id\\": \\"" + c.id + "\\"}" }}', "[TOOL_CALLS] [", "]", ", ", NINE
    ),
    "Apertus": writes("{{ {f.name: f.arguments} | tojson }}", "<|tools_prefix|>[", "]<|tools_suffix|>", ", "),
    "Mistral v11": writes("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "Mistral v11 with ids": writes(
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}", only=NINE
    ),
    "Mistral without marks": writes("{{ f.name }}{{ f.arguments | tojson }}", only=ONE),
    "DeepSeek V3 and R1": writes(
        "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments }}\n```"
        "<｜tool▁call▁end｜>",
        *DEEPSEEK,
        "\n",
    ),
    "DeepSeek V3.1": writes(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments }}<｜tool▁call▁end｜>", *DEEPSEEK
    ),
    "DeepSeek V3.2": writes(
        '<｜DSML｜invoke name="{{ f.name }}">\n' + ITEMS + '<｜DSML｜parameter name="{{ k }}" string='
        "\"{{ 'true' if v is string else 'false' }}\">" + RAW + "</｜DSML｜parameter>\n{% endfor %}"
        "</｜DSML｜invoke>\n",
        "\n\n<｜DSML｜function_calls>\n",
        "</｜DSML｜function_calls>",
    ),
    "Kimi K2": writes(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "Llama 3.1": writes('{{ {"name": f.name, "parameters": f.arguments} | tojson }}', only=ONE),
    "xLAM": writes('{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}', "[", "]", ", "),
    "MiniMax M2": writes(
        '<invoke name="{{ f.name }}">\n' + ITEMS + TAGGED + "</invoke>",
        "\n<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
        "\n",
    ),
    "Seed-OSS": writes(
        "<seed:tool_call>\n<function={{ f.name }}>\n" + ITEMS + "<parameter={{ k }}>" + RAW + "</parameter>\n"
        "{% endfor %}</function>\n</seed:tool_call>",
        between="\n",
    ),
    "Command R": writes(
        '    {\n        "tool_name": "{{ f.name }}",\n        "parameters": '
        "{{ f.arguments | tojson }}\n    }",
        "Action: ```json\n[\n",
        "\n]```",
        ",\n",
    ),
    "Command R7B": writes(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}",
        "<|START_ACTION|>[\n",
        "\n]<|END_ACTION|>",
        ",\n",
    ),
    "Hunyuan": writes(
        "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>",
        "<tool_calls>",
        "</tool_calls>",
        "\n",
    ),
    "Solar Open": writes(
        "<|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
        "{{ f.arguments | tojson }}<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    "Granite": writes("{{ c | tojson }}", "<|tool_call|>[", "]", ", "),
    "functionary": writes("<function={{ f.name }}>{{ f.arguments }}</function>"),
}
"""Each keeps every value of an argument."""
MARKED_TEXTS = {
    "Gemma": writes(
        "<start_function_call>call:{{ f.name }}{{ '{' }}"
        + ITEMS
        + "{{ k }}:{% if v is string %}<escape>{{ v }}"
        "<escape>{% else %}{{ v | tojson | replace('\"', '<escape>') }}{% endif %}{% if not loop.last %},"
        "{% endif %}{% endfor %}{{ '}' }}<end_function_call>"
    ),
    "Gemma, with each value as a text": writes(
        "<start_function_call>call:{{ f.name }}{{ '{' }}"
        + ITEMS
        + "{{ k }}:<escape>{{ v }}<escape>{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
        "<end_function_call>"
    ),
    "Llama 4": writes("{{ f.name }}(" + ITEMS + '{{ k }}="{{ v }}"' + PYTHON, "[", "]", ", "),
    "OLMo 3": writes(
        "{{ f.name }}("
        + ITEMS
        + "{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v | tojson }}{% endif %}"
        + PYTHON,
        "<function_calls>\n",
        "\n</function_calls>",
        "\n",
    ),
}
"""These write texts between quotes as they are, so a quote ends a text."""
NO_CALLS = f"{SHOWN}{{% for m in messages %}}{SAY}<|end|>{{% endfor %}}{ASK}"
UNKNOWN = writes("CALL {{ f.name }} WITH {{ f.arguments.values() | list | join(' AND ') }}")


def rendered(
    template: str, messages: list[dict[str, Any]], *, prompt: bool = False, tools: Any = None
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=prompt
    )
    return str(texts[0])
