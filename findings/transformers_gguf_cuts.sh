#!/usr/bin/env bash
# transformers 5.24.0 (gguf 0.19.0): a GGUF file whose cuts of text are "smollm" is read with those of GPT-2.
#
# Expected. `tokenizer.ggml.pre` names where text is cut before pairs are merged. "smollm" parts every digit from what is
#   before it. A name that the reader does not know is an error, as an unknown `tokenizer.ggml.model` is.
# Seen. AutoTokenizer.from_pretrained(..., gguf_file=...) knows "llama-bpe" and "qwen2". For "smollm", and for any name that
#   it does not know, it cuts as GPT-2 does, without a warning. decode(encode(text)) is the text, so no round trip shows it.
# Output.
#   llama-bpe read ['the', 'Ġ', 'Ġ', '123']            meant ['the', 'Ġ', 'Ġ', '123']
#   qwen2     read ['the', 'Ġ', 'Ġ', '1', '2', '3']    meant ['the', 'Ġ', 'Ġ', '1', '2', '3']
#   smollm    read ['the', 'Ġ', 'Ġ1', '2', '3']        meant ['the', 'ĠĠ', '1', '2', '3']
#   no-such   read ['the', 'Ġ', 'Ġ1', '2', '3']
# Why it matters. The published files of SmolLM2 say "smollm". Imported so, the model reads indented numbers and tables in
#   pieces that it was not trained on. Set backend_tokenizer.pre_tokenizer by the file, and refuse a name that is not known.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{ python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q transformers==5.24.0 gguf==0.19.0 torch==2.13.0 numpy==2.3.5; } || exit 2

cd "$folder" && HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>/dev/null <<'PY'
import sys

from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

MERGES = ["Ġ Ġ", "t h", "th e", "Ġ 1", "1 2", "12 3"]
TOKENS = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TEXT = "the  123"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CUTS = {
    "llama-bpe": (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST, False),
    "qwen2": (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST, False),
    "smollm": (r"\p{N}", True),
}


def meant(pre):
    pattern, more = CUTS[pre]
    bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, [tuple(m.split(" ")) for m in MERGES]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=more)]
    )
    return bpe.encode(TEXT).tokens


def read(pre):
    writer = GGUFWriter(f"{pre}.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return AutoTokenizer.from_pretrained(".", gguf_file=f"{pre}.gguf").tokenize(TEXT)


seen = {pre: read(pre) for pre in (*CUTS, "no-such")}
for pre, tokens in seen.items():
    print(f"{pre:9} read {tokens!s:32}" + (f" meant {meant(pre)}" if pre in CUTS else ""))
if not all(seen[pre] == meant(pre) for pre in ("llama-bpe", "qwen2")):
    sys.exit("changed: the known cuts are not those of the file")
if seen["smollm"] != seen["no-such"] or seen["smollm"] == meant("smollm"):
    sys.exit("changed: smollm is read, or an unknown name is not cut as GPT-2 does")
PY
