"""How far log-probs and gradients of a trainer are off in bfloat16 and in fp8 (`trainer.quantization`).

    python benchmarks/trainer_fp8.py [--model DIRECTORY] [--tokens 512] [--json]

The truth is the same trainer in float32, with the same weights rounded to bfloat16. Without a DIRECTORY the
model is random, with layers in the shape of Qwen3 0.6B, and so are the tokens. With one, they are the text of
this repository's documentation. The loss is a sum of the tokens' log-probs with random weights. A CPU makes
the numbers that a GPU makes, but for the order of sums. It says nothing about speed.

gap        |log-prob - true log-prob| of a token, in nats: the mean, and the largest of 99 % of the tokens
gradient   length of the difference of the whole gradient over the length of the true one; and its cosine
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import ROOT, parser_of, report, say, sized, table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from millrace.trainer.batch.packing import Branch, Tree, pack
from millrace.trainer.model import load_model, row_logprobs, served_weights

ROWS = 3
WIDE, LAYERS, VOCAB = sized((1024, 6, 32_000), (64, 2, 500))


def random_model(directory: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDE,
        intermediate_size=3 * WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDE // 64,
        num_key_value_heads=WIDE // 128 or 1,
        head_dim=sized(128, 32),
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def text_of(model: Path, count: int) -> list[list[int]]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(" ".join(page.read_text() for page in pages[: 2 * ROWS]))["input_ids"]
    return [ids[first : first + count] for first in range(0, ROWS * count, count)]


def computed(model_dir: Path, rows: Sequence[Sequence[int]], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probs of all rows, and the whole gradient, in float64."""
    model = load_model(model_dir, torch.device("cpu"), quantised=name == "fp8")
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    random, found = np.random.default_rng(0), []
    with served_weights(model, published=torch.bfloat16, computing=dtype):
        for tokens in rows:
            tree = Tree(tokens[:1], [Branch(tokens[1:], np.ones(len(tokens) - 1, np.bool_), 0)])
            (row,) = pack([tree], len(tokens))
            logprobs, _ = row_logprobs(model, row, temperature=1.0, dtype=dtype)
            (logprobs * torch.from_numpy(random.standard_normal(len(logprobs)))).sum().backward()
            found.append(logprobs.detach())
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(found).double(), torch.cat(gradients).double()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--tokens", type=int, default=sized(512, 32), help="of each of the rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = options.model or random_model(Path(place))
        drawn = np.random.default_rng(1).integers(0, VOCAB, (ROWS, options.tokens)).tolist()
        rows = text_of(model, options.tokens) if options.model else drawn
        true, gradient = computed(model, rows, "float32")
        result = {}
        for name in ("bfloat16", "fp8"):
            say(name)
            logprobs, other = computed(model, rows, name)
            gap = (logprobs - true).abs()
            result[name] = {
                "gap_mean": gap.mean().item(),
                "gap_p99": gap.quantile(0.99).item(),
                "gradient": ((other - gradient).norm() / gradient.norm()).item(),
                "cosine": (other @ gradient / other.norm() / gradient.norm()).item(),
            }
    table(result)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
