"""Which current models are trained and served: the table of docs/models.md.

    python benchmarks/model_table.py [--write] [--json]

Nothing is loaded or measured. A row is what the checks before a run say of a model's configuration. The
facts are files of `tests/models`, each with its sources; `tests/unit/test_models_people_load.py` tests each
row. `--write` puts the table into the document.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, NamedTuple

from common import ROOT, parser_of, report, write_table

from millrace.checks.model_problems import filled_in
from millrace.core.errors import DataError
from millrace.core.supported import MXFP4, TORCH_ENGINE, TRAINER, VLLM, Supported, refuse_unsupported

DOCUMENT, FACTS = ROOT / "docs" / "models.md", ROOT / "tests" / "models"
THOUGHT = "hm"  # what a past turn of `Facts.history` thought


class Facts(NamedTuple):
    """What is known of a model.

    config, generation_config  what the files of these names say, None: no such file is known
    tokens     the tokenizer's end and begin, and the ids of some special tokens
    thinks     the model thinks before it answers
    template   the file of ours in `templates` that renders as the model's own template does; None: not known
    renders    "prompt": of the message "Hi". "history": after a turn that thought "hm". "without_thinking":
               with the "arguments"
    """

    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tokens: dict[str, Any]
    thinks: bool
    template: str | None
    renders: dict[str, Any] | None

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration that is trained: of the text part, if there is one, with dequantized weights."""
        if (self.config.get("quantization_config") or {}).get("quant_method") == MXFP4:
            return {key: value for key, value in self.config.items() if key != "quantization_config"}
        shared = {key: value for key, value in self.config.items() if key.endswith("_token_id")}
        return shared | self.config["text_config"] if "text_config" in self.config else self.config


@cache
def facts() -> dict[str, Facts]:
    files = sorted(FACTS.glob("*.json"), key=lambda file: file.stem.lower())
    tables = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    return {
        name: Facts(name, **{key: value for key, value in each.items() if key != "sources"})
        for name, each in tables.items()
    }


def refusal(config: dict[str, Any], supported: Supported = TRAINER) -> str:
    """Why a model of `config` is refused; empty: it is not."""
    try:
        refuse_unsupported(filled_in(config), supported)
    except DataError as error:
        return re.sub(r"^.*?: (?:it has )?|; it runs.*$|\.$", "", str(error).splitlines()[0])
    return ""


def ends(each: Facts) -> list[int]:
    """Ids that end a completion: of both files and of the tokenizer."""
    end_ids = [part.get("eos_token_id") for part in (each.config, each.generation_config or {})]
    flat = [token for one in end_ids for token in (one if isinstance(one, list) else [one])]
    return sorted({token for token in (*flat, each.tokens["ids"][each.tokens["eos"]]) if token is not None})


def past_thinking(each: Facts) -> str:
    """What becomes of the thinking of past turns."""
    if not each.thinks or each.renders is None:
        return "" if not each.thinks else "not known"
    return "kept" if THOUGHT in each.renders["history"] else "left out"


def cell(code: str) -> str:
    """Code in a cell of a table."""
    return f"`{code}`".replace("|", "\\|")


def row(each: Facts) -> str:
    reason, text = refusal(each.text_config), each.text_config
    family = f"`{each.config['model_type']}`"
    trained = f"no: {reason}" if reason else "yes"
    if not reason and text is not each.config:
        trained = "text part" if "text_config" in each.config else "dequantized"
    names = {index: name for name, index in each.tokens["ids"].items()}
    stops = " ".join(cell(names[end]) for end in ends(each))
    arguments = " ".join(f"`{key}`" for key in (each.renders or {}).get("arguments", ()))
    adapter = "no" if reason or text.get("num_experts") or text.get("num_local_experts") else "yes"
    served = ["no" if reason or refusal(text, engine) else "yes" for engine in (TORCH_ENGINE, VLLM)]
    cells = (each.name, family, trained, stops, arguments, past_thinking(each), adapter, *served)
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def rows() -> list[str]:
    """The table, in Markdown."""
    head = ("model", "family", "trained", "ends", "arguments", "past thinking", "adapter", "own", "vLLM")
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *map(row, facts().values())]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    options = parser.parse_args()
    lines = rows()
    print("\n".join(lines))
    if options.write:
        write_table(DOCUMENT, "model_table.py", lines)
    report({"rows": lines, "num_rows": len(lines) - 2}, as_json=options.json)


if __name__ == "__main__":
    main()
