"""Loads the tokenizer of a model directory, and makes a small tokenizer of characters."""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, time
from pathlib import Path
from typing import Any

from millrace.core.errors import DataError

Decode = Callable[[Sequence[int]], str]

END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + ASSISTANT + "' if message['role'] == 'assistant' else '" + USER + "' }}"
    "{{ message['content'] }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A directory with none of these has no tokenizer. transformers would make an empty tokenizer without an
error."""

READ = (*FILES, "tokenizer_config.json", "config.json", "merges.txt", "special_tokens_map.json",
        "added_tokens.json", "chat_template.jinja", "chat_template.json")  # fmt: skip
FILE_BYTES_MAX = 256 << 20

# A tokenizer of one of these classes consists of its tokenizer.json alone. So it can be read without the auto
# classes of transformers, which import torch. A reward worker saves 2 s and 100 MB.
_PLAIN_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
_encoding = threading.Lock()
_DIRECTIVES = (*string.ascii_letters, "-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", "%")
"""Of strftime."""
_DRAWN = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_PROBE = "a"


def make_character_tokenizer(directory: str | Path, alphabet: str) -> None:
    """Save a tokenizer with one token per character of `alphabet` as a Hugging Face directory.

    For small models and tests: nothing is learned, digits are single tokens, decoding gives the text exactly,
    and other characters become `<|unknown|>`. The tokenizer has `<|end|>` (end of sequence), `<|pad|>` and a
    chat template with `<|user|>` and `<|assistant|>`. Special tokens come first, then the alphabet in the
    given order without repeats.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, UNKNOWN, USER, ASSISTANT]
    vocabulary = {token: index for index, token in enumerate([*special, *dict.fromkeys(alphabet)])}
    # Byte-pair encoding without merges has one token per known character.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))


def load_dated_tokenizer(directory: str | Path, date: str | None) -> Any:
    """The tokenizer, whose chat template writes this date in place of the clock's, at midnight. None: today.

    Raises: DataError: as `load_tokenizer`; or the template draws at random, so no prompt is made twice."""
    tokenizer = load_tokenizer(directory)
    if _DRAWN.search(str(getattr(tokenizer, "chat_template", None))):
        raise DataError(
            f"the chat template in {directory} draws at random: the same row would have other prompts each "
            "time\n  Take `random` out of chat_template.jinja."
        )
    day = datetime.combine(datetime.now() if date is None else datetime.fromisoformat(date), time.min)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        tokenizer.chat_template = {name: _dated(one, day) for name, one in template.items()}
    elif template:
        tokenizer.chat_template = _dated(template, day)
    return tokenizer


def _dated(template: str, day: datetime) -> str:
    """The template with a `strftime_now` of its own. transformers gives it the clock's, and takes no function
    among the arguments. It stays at the begin of a line: there Jinja removes space before blocks."""
    if "strftime_now" not in template:
        return template
    words = "".join(f"|replace('%{one}', {json.dumps(day.strftime(f'%{one}'))})" for one in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{words} -}}}}{{%- endmacro %}}\n{template}"


def load_tokenizer(directory: str | Path) -> Any:
    """The Hugging Face tokenizer of a model directory, without importing torch if that is possible.

    Raises:
        DataError: there is no tokenizer, or the tokenizer cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"no model directory at {directory}: set `model.path` to one with a tokenizer")
    if not any((directory / name).is_file() for name in FILES):
        raise DataError(f"{directory} has no tokenizer ({' or '.join(FILES)}): save one there")
    _refuse_odd(directory)
    try:
        if _is_plain(directory):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(directory))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:
        raise DataError(
            f"the tokenizer in {directory} cannot be read ({type(error).__name__}: {error}): "
            "save one there with `tokenizer.save_pretrained(...)`"
        ) from error


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt that is text, in training, evaluation, `sft`, `curate` and `serve`.

    The prompt begins once with the tokens that the tokenizer puts before a text, also if the text has them
    already. The prompt lacks those that the tokenizer puts behind a text, because a completion follows. What
    a chat template renders has its own special tokens: see `encode`.
    """
    ids, begin = encode(tokenizer, text), _begin(tokenizer)
    return ids if ids[: len(begin)] == begin else begin + ids


def _begin(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text, such as its begin-of-sequence token."""
    whole, plain = encode(tokenizer, _PROBE, add_special_tokens=True), encode(tokenizer, _PROBE)
    if not plain:  # the vocabulary lacks the probe
        return [one for one in whole if one != tokenizer.eos_token_id]
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((n for n in starts if whole[n : n + len(plain)] == plain), 0)]


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False, **options: bool) -> list[int]:
    """`tokenizer.encode`, for one thread at a time. Nothing is added: so are chats encoded that a template
    has rendered, and completions.

    A fast tokenizer keeps `split_special_tokens` of the last call for all threads. Another thread would
    encode a special token as text, or text as a special token."""
    with _encoding:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, **options))


def check_characters(where: str, text: str) -> None:
    """Refuse half of a surrogate pair. JSON can contain it, and no tokenizer can encode it.

    Raises: DataError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is half a character ({text[error.start]!a}): write both "
            "halves of the pair, or leave it out"
        ) from None


def _refuse_odd(directory: Path) -> None:
    """Raises: DataError: a file of the directory is no plain file. A run of another person may name such a
    file."""
    named = directory.glob("additional_chat_templates/*")
    for path in (*(directory / name for name in READ if (directory / name).exists()), *named):
        if not path.is_file() or path.stat().st_size > FILE_BYTES_MAX:
            raise DataError(f"{path} is no file of a tokenizer: it is no regular file, or has too many bytes")


def _is_plain(directory: Path) -> bool:
    settings = directory / "tokenizer_config.json"
    if not (directory / "tokenizer.json").is_file() or not settings.is_file():
        return False
    return json.loads(settings.read_text()).get("tokenizer_class") in _PLAIN_CLASSES


def open_decoder(model_path: str) -> Decode | None:
    """Token ids to the text that a reward sees. None: the model has no tokenizer.json that can be read.
    Reading other files would need torch."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file() or file.stat().st_size > FILE_BYTES_MAX:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more exact
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))
