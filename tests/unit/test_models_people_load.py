"""Current models, each from its configuration, its tokens and the format of its template (`tests/models`).

Weights are random, sizes are cut down, and ids of special tokens are numbered anew. Templates are short ones
of ours that render in the format of the model's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_table
import numpy as np
import pytest
import torch
from common import parts_of
from engine_models import make_work, run
from model_table import Facts, cell, ends, facts, refusal, row
from tests.long import few
from tokenizers import Tokenizer, decoders, models
from trainer_doubles import sequence_logprobs
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from millrace.config.tables.task import FileTaskSection
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core.errors import DataError
from millrace.core.turns.end_ids import end_ids
from millrace.core.types import Finish, Sampling
from millrace.engines.own.load_engine import load_engine
from millrace.tasks.tasks import make_task
from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.model import load_model, row_logprobs

CPU = torch.device("cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = list(facts())
TRAINED = [name for name, each in facts().items() if not refusal(each.text_config)]
RENDERED = [name for name, each in facts().items() if each.renders]
PROMPT = [{"role": "user", "content": "Hi"}]
ANSWERED = [
    *PROMPT,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"},
    {"role": "user", "content": "Why?"},
]
SMALL = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "num_local_experts": 6,
         "num_experts_per_tok": 2,
         "max_position_embeddings": 256, "original_max_position_embeddings": 32,
         "vocab_size": 64}  # fmt: skip
LAYERS = 2
NOT_SAID = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                            "vocab_size": 262208, "sliding_window_pattern": 6}}  # fmt: skip
"""By family, what files leave to transformers."""


def renumbered(each: Facts) -> dict[int, int]:
    """Small ids for those of the special tokens."""
    return {old: new for new, old in enumerate(sorted(each.tokens["ids"].values()))}


def small(config: dict[str, Any], ids: dict[int, int]) -> dict[str, Any]:
    """The configuration with small sizes. What is no size stays."""
    config = NOT_SAID.get(config["model_type"], {}) | config
    config = {key: SMALL[key] if value and key in SMALL else value for key, value in config.items()}
    layers = config.get("sliding_window_pattern") or config.get("no_rope_layer_interval") or LAYERS
    config["num_hidden_layers"] = layers
    if kinds := config.get("layer_types"):
        config["layer_types"] = kinds[:layers]
    if config.get("sliding_window"):
        config["sliding_window"] = 8
    if (rope := config.get("rope_scaling")) and "original_max_position_embeddings" in rope:
        config["rope_scaling"] = rope | {"original_max_position_embeddings": 32}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_ids = config.pop(key, None)
        if token_ids is not None:
            kept = [
                ids[one] for one in (token_ids if isinstance(token_ids, list) else [token_ids]) if one in ids
            ]
            config[key] = kept if isinstance(token_ids, list) else kept[0] if kept else None
    return config


def save_tokenizer(each: Facts, directory: Path) -> None:
    ids = renumbered(each)
    special = {token: ids[index] for token, index in each.tokens["ids"].items()}
    letters = {letter: len(special) + place for place, letter in enumerate(LETTERS)}
    backend = Tokenizer(models.BPE(vocab=special | letters, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=each.tokens["eos"], bos_token=each.tokens["bos"]
    )
    if each.template is not None:
        file = model_table.FACTS / "templates" / f"{each.template}.jinja"
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    tokenizer.save_pretrained(str(directory))


def save_files(each: Facts, directory: Path) -> None:
    """config.json, generation_config.json and a tokenizer, with small sizes and ids."""
    ids = renumbered(each)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(small(each.text_config, ids)))
    if each.generation_config is not None:
        ended = each.generation_config["eos_token_id"]
        eos_token_id = [ids[one] for one in ended] if isinstance(ended, list) else ids[ended]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    save_tokenizer(each, directory)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a random model of each name, made once."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model") / name
            save_files(facts()[name], made[name])
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made[name]))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
            model.save_pretrained(made[name])
            (made[name] / "generation_config.json").unlink(missing_ok=True)
            save_files(facts()[name], made[name])
        return made[name]

    return directory


def test_the_document_has_the_table_that_the_facts_give() -> None:
    table = parts_of(model_table.DOCUMENT, "model_table.py")[1]
    assert table.splitlines() == model_table.rows(), "run `python benchmarks/model_table.py --write`"
    assert len(NAMES) >= 25


@pytest.mark.parametrize("name", NAMES)
def test_every_fact_of_a_model_has_a_source(name: str) -> None:
    fact_file = json.loads((model_table.FACTS / f"{name}.json").read_text(encoding="utf-8"))
    assert fact_file["sources"]


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(TRAINED)))
def test_a_refused_model_is_refused_by_name_with_the_reason_of_its_row(name: str, tmp_path: Path) -> None:
    each = facts()[name]
    (tmp_path / "config.json").write_text(json.dumps(each.text_config))
    with pytest.raises(DataError) as error:
        load_model(tmp_path, CPU)
    message = str(error.value)
    assert each.text_config["model_type"] in message and refusal(each.text_config) in message
    assert f"no: {refusal(each.text_config)}" in row(each)


@pytest.mark.parametrize("name", NAMES)
def test_completions_end_with_every_end_that_the_row_names(name: str, tmp_path: Path) -> None:
    each = facts()[name]
    save_files(each, tmp_path)
    ids = renumbered(each)
    assert end_ids(str(tmp_path), load_tokenizer(tmp_path)) == {ids[end] for end in ends(each)}
    names = [token for token, index in each.tokens["ids"].items() if index in ends(each)]
    assert len(names) == len(ends(each)) and all(cell(name) in row(each) for name in names)


@pytest.mark.parametrize("name", few(TRAINED, 8))
def test_trainer_engine_and_transformers_agree_and_an_end_stops_generation(name: str, model_of: Any) -> None:
    directory = model_of(name)
    engine = load_engine(str(directory), device="cpu", slots=4, max_sequence_tokens=128)
    prompt = [len(facts()[name].tokens["ids"]) + place for place in (7, 3, 11)]
    tokens, logprobs, _ = run(engine, [make_work(0, prompt, Sampling(max_tokens=40, ignore_eos=True))])[0]
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    due = sequence_logprobs(model, prompt, tokens)
    assert (torch.tensor(logprobs) - due).abs().max() < 1e-4

    [packed] = pack([Tree(prompt, [Branch(tokens, np.ones(len(tokens), bool), 0)])], 4096)
    with torch.no_grad():
        trained = row_logprobs(load_model(directory, CPU), packed, temperature=1.0, dtype=torch.float32)[0]
    assert (trained[packed.flat_N.argsort()] - due).abs().max() < 1e-4

    stops = end_ids(str(directory), load_tokenizer(directory))
    either = Sampling(max_tokens=60, allowed_token_ids=(*stops, prompt[0]))
    ended = run(engine, [make_work(index, prompt, either, lease=1) for index in range(1, 5)])
    for tokens, _, finish in ended.values():
        assert not stops & set(tokens[:-1])
        assert (finish == Finish.STOP) == (tokens[-1] in stops)


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_is_rendered_as_the_row_says(name: str, tmp_path: Path) -> None:
    each, rows = facts()[name], tmp_path / "rows.jsonl"
    assert each.renders is not None
    save_tokenizer(each, tmp_path)
    tokenizer = load_tokenizer(tmp_path)

    def rendered(messages: list[dict[str, str]], **arguments: Any) -> str:
        rows.write_text(json.dumps({"prompt": messages, "answer": ""}) + "\n")
        return make_task(FileTaskSection(path=str(rows), chat_arguments=arguments), tokenizer).prompt_text(0)

    assert rendered(PROMPT) == each.renders["prompt"]
    if "history" in each.renders:
        assert rendered(ANSWERED) == each.renders["history"]
    if "arguments" in each.renders:
        assert rendered(PROMPT, **each.renders["arguments"]) == each.renders["without_thinking"]
