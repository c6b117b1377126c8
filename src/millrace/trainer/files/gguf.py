"""A GGUF file as a model directory, by transformers' own reader.

What that reader leaves out is done here: how the text is cut before its pairs are merged
(`tokenizer.ggml.pre`), and every token that ends a turn. What it would drop without a word is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.core.errors import DataError, boundary
from millrace.core.extras import refuse_missing
from millrace.trainer.files.directories import atomic_directory

FAMILIES = ("llama", "qwen2", "qwen3")
"""`general.architecture` of files whose tensors were compared with those of the model they were made of."""
READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
"""Keys of a model that are read. Such as `rope.scaling.factor` is not: positions would be others."""
LONG = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": r"\p{N}",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
"""Where text is cut before pairs are merged, by `tokenizer.ggml.pre`. None: as GPT-2 does, and no more. After
the cuts of "smollm" GPT-2's come too. Source: the pre-tokenizers of llama.cpp."""
ALSO_GPT2 = ("gpt-2", "smollm")
SENTENCE = "The quick brown fox jumps over the lazy dog.\n\n  12 + 345 = 357; don't\tpanic: naïve 漢字."
QUESTION = "What is 7 + 5? Answer with the number only."
ANSWER_TOKENS = 40


@dataclass(frozen=True)
class Imported:
    """What a look at the written model showed. `log_prob`: the mean over the tokens of `SENTENCE`, in nats;
    `guess`: that of a guess. `prompt`, `answer`: of `QUESTION`, rendered as a chat and decoded greedily;
    `ended`: by a token of `ends`."""

    family: str
    parameters: int
    log_prob: float
    guess: float
    prompt: str
    answer: str
    ended: bool
    ends: tuple[str, ...]
    license: str


def import_gguf(file: Path, out: Path) -> Imported:
    """Write the model of a GGUF file to the directory `out`, in float32, and look at what was written.

    Raises:
        ConfigError: the package `gguf` is missing.
        DataError: a family, a tensor, a key of the model or a kind of tokenizer that is not known, or a
            tokenizer that changes its text.
    """
    refuse_missing("gguf", f"{file}, a GGUF file,")
    from gguf import GGUFReader

    with boundary("`import`", f"read {file}: it is no GGUF file, or is cut off", DataError):
        reader = GGUFReader(file)
    facts = {key: field.contents() for key, field in reader.fields.items() if key not in LONG}
    if (family := facts.get("general.architecture")) not in FAMILIES:
        raise DataError(f"{file} is of the family {family!r}. Known are {', '.join(FAMILIES)}")
    _refuse_unread(file, facts)
    pre = _pre(file, facts)
    with atomic_directory(out, marker="config.json") as directory:
        tokenizer = _write_tokenizer(file, directory, pre)
        model = _load(file, reader.tensors, facts)
        ends = _ends(tokenizer, facts)
        _write_model(model, directory, tokenizer, ends)
        (directory / "README.md").write_text(_note(file, facts, reader.tensors), encoding="utf-8")
        return _look(directory, str(family), str(facts.get("general.license", "not stated")))


def _refuse_unread(file: Path, facts: dict[str, Any]) -> None:
    """Raises: DataError: the model has a key that transformers does not read."""
    begin = f"{facts['general.architecture']}."
    keys = {key.removeprefix(begin) for key in facts if key.startswith(begin)}
    scaling = facts.get(f"{begin}rope.scaling.type", "none")
    if unread := sorted(keys - READ - ({"rope.scaling.type"} if scaling == "none" else set())):
        raise DataError(f"{file}: its model has {', '.join(unread)}, which would be lost")
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.get(begin + key, _head_dim(facts)) != _head_dim(facts):
            raise DataError(
                f"{file}: {key} is {facts[begin + key]}, and a head has {_head_dim(facts)} dimensions"
            )


def _head_dim(facts: dict[str, Any]) -> int:
    begin = f"{facts['general.architecture']}."
    share = facts[f"{begin}embedding_length"] // facts[f"{begin}attention.head_count"]
    return int(facts.get(f"{begin}attention.key_length", share))


def _pre(file: Path, facts: dict[str, Any]) -> str:
    """A key of `CUTS`. Raises: DataError: a kind of tokenizer that is not known."""
    kind, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in CUTS:
        raise DataError(
            f"{file}: its tokenizer is of the kind {kind!r}, cut as {pre!r}. Known is 'gpt2', cut as "
            f"{', '.join(CUTS)}"
        )
    return str(pre)


def _write_tokenizer(file: Path, directory: Path, pre: str) -> Any:
    """The tokenizer as it is read again. Raises: DataError: it cannot be read, or changes `SENTENCE`."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import AutoTokenizer

    with boundary("`import`", f"read the tokenizer of {file}", DataError):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ALSO_GPT2)]
    if (pattern := CUTS[pre]) is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(directory)
    read = AutoTokenizer.from_pretrained(directory)
    ids = read.encode(SENTENCE, add_special_tokens=False)
    if (text := read.decode(ids)) != SENTENCE:
        raise DataError(f"{file}: its tokenizer makes {text!r} of {SENTENCE!r}")
    return read


def _load(file: Path, tensors: list[Any], facts: dict[str, Any]) -> Any:
    """The model in float32. Raises: DataError: a tensor of the file or of the model is left over."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with boundary("`import`", f"read the weights of {file}", DataError):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        config.head_dim = _head_dim(facts)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            file.parent, config=config, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    del loaded.config.quantization_config  # a model that has it is not saved
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    left = {
        kind: sorted(map(str, report[f"{kind}_keys"])) for kind in ("missing", "mismatched", "unexpected")
    }
    read = sum(parameter.numel() for parameter in model.parameters())
    given = sum(int(tensor.n_elements) for tensor in tensors)
    if any(left.values()) or read != given:
        left["unexpected"] = left["unexpected"] or _rare(tensors)
        names = "; ".join(f"{kind}: {', '.join(names[:4])}" for kind, names in left.items() if names)
        raise DataError(f"{file} has {given:,} numbers, and its model {read:,}. Tensors {names}")
    return model


def _rare(tensors: list[Any]) -> list[str]:
    """Names that not every layer has, but for those of every model."""
    usual = {"token_embd.weight", "output.weight", "output_norm.weight"}
    return sorted({tensor.name for tensor in tensors if not tensor.name.startswith("blk.")} - usual)[:4]


def _ends(tokenizer: Any, facts: dict[str, Any]) -> list[int]:
    """Every token that ends a turn: those that the file names, and the one behind a turn of its template."""
    named = [facts.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = {int(one) for one in named if one is not None}
    if tokenizer.chat_template:
        word = "Ready"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        behind = tokenizer.encode(text.rpartition(word)[2].lstrip(), add_special_tokens=False)
        ends |= set(behind[:1]) & set(tokenizer.all_special_ids + list(tokenizer.added_tokens_decoder))
    if not ends:
        raise DataError("the file names no token that ends a turn, and its template shows none")
    return sorted(ends)


def _write_model(model: Any, directory: Path, tokenizer: Any, ends: list[int]) -> None:
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)


def _note(file: Path, facts: dict[str, Any], tensors: list[Any]) -> str:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    said = {key.removeprefix("general."): facts[key] for key in sorted(facts) if key.startswith("general.")}
    lines = [
        f"This model was made of the file {file.name}.\n",
        f"- sha256: {digest}",
        "- kinds of numbers in the file: " + ", ".join(f"{kind} ({num})" for kind, num in kinds.items()),
        "- here: float32",
        *(f"- {key}: {value}" for key, value in said.items()),
    ]
    return "\n".join(lines) + "\n"


@torch.no_grad()
def _look(directory: Path, family: str, license_: str) -> Imported:
    """Read the directory as any user does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(SENTENCE)])
    scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    log_prob = scores.mean().item()
    prompt = QUESTION
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": QUESTION}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    asked = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")
    ends = GenerationConfig.from_pretrained(directory).eos_token_id
    out = model.generate(**asked, do_sample=False, max_new_tokens=ANSWER_TOKENS)[
        0, asked["input_ids"].shape[1] :
    ]
    return Imported(
        family=family,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        log_prob=log_prob,
        guess=-math.log(model.config.vocab_size),
        prompt=prompt,
        answer=tokenizer.decode(out, skip_special_tokens=True),
        ended=int(out[-1]) in ends,
        ends=tuple(tokenizer.convert_ids_to_tokens(ends)),
        license=license_,
    )
