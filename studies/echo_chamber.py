"""Does RL amplify one format of a pretraining mixture? By scale and by KL coefficient, over seeds.

    python studies/echo_chamber.py [--seeds 3] [--at-once 2] [--quick] [--json]
    python studies/echo_chamber.py --results    # of the results in the repository, without training

A model is trained from scratch on sums that are answered in three formats (`echo_formats.py`), then by
`millrace train` with the right sum as the only reward, in whatever format. The question is that of Zhao et
al., arXiv:2504.07912, "Echo Chamber". Every result is kept as soon as it is made, so the same command goes on
after an interrupt. One that is complete prints its tables and writes its plots again in seconds.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from common import ROOT, parser_of, report, require, run_logged, say, sized, train
from echo_formats import (
    ANSWER,
    FORMATS,
    WORDS,
    Answer,
    Tally,
    demonstrations,
    format_of,
    problems,
    prompt,
    text_of,
)
from echo_tables import cells, figures, tables
from study import IMAGES, RESULTS, Result, Results, directory, save_chart, write_tables

from millrace.ledger.reading import LedgerReader
from millrace_ui.curves.choices import Band
from millrace_ui.curves.curve_lines import Line, group_line

SCALES = {"small": (64, 1), "medium": (96, 2), "large": (128, 3)}
"""Name -> width and number of layers."""
MIXTURES = {
    "even": {"direct": 1 / 3, "words": 1 / 3, "code": 1 / 3},
    "few words": {"direct": 0.45, "words": 0.1, "code": 0.45},
}
KLS = (0.0, 0.1, 0.5)
LR, LOWER_LR = 3e-4, 1e-4
PHASES = [
    [("even", scale, kl, LR) for kl in (KLS[0], KLS[-1]) for scale in SCALES],
    [
        *(("even", scale, KLS[1], LR) for scale in SCALES),
        *(("even", "large", kl, LOWER_LR) for kl in (KLS[0], KLS[-1])),
        ("few words", "medium", KLS[0], LR),
    ],
]
"""(mixture, scale, KL coefficient, learning rate) of each run, for every seed. The first phase of all seeds
comes before the second."""
PHASES = sized(PHASES, [[("even", "small", kl, LR) for kl in (KLS[0], KLS[-1])]])

SFT_STEPS, DEMONSTRATIONS = sized(220, 3), sized(12_000, 200)
STEPS = sized(80, 4)
WINDOW = sized(8, 2)  # steps of a point of a curve
GROUPS, GROUP_SIZE = sized(16, 4), 16
HELD_OUT, SAMPLES = sized(64, 4), 16
NUM_SEEDS = sized(3, 1)
STUDY = "echo-chamber"
PAGE = ROOT / "reports" / "echo-chamber.md"

SFT = """
steps = {steps}
seed = {seed}
lr = {lr}
optimizer = "{optimizer}"
batch_tokens = 2500
token_budget = 1300
model = {{ path = "{base}", out = "{out}", device = "cpu" }}
data = {{ path = "{data}" }}
"""

RUN = """
steps = {steps}
seed = {seed}
model = {{ path = "{start}", device = "cpu" }}
algorithm = {{ kind = "grpo", kl = {kl} }}
task = {{ kind = "file", path = "{rows}" }}
reward = {{ kind = "exact", workers = 1, extract = '{extract}' }}
batch = {{ prompts = {groups}, group_size = {group_size}, token_budget = 2048 }}
sampling.max_tokens = 24
optimizer = {{ lr = {lr}, warmup_steps = 5 }}
schedule.kind = "synchronous"
rollout = {{ replicas = 1, slots = 256, max_sequence_tokens = 32, report_interval_s = 0.02 }}
checkpoints.every = 1000

[[evaluations]]
name = "held-out"
every = {steps}
prompts = {held_out}
samples = {samples}
task = {{ kind = "file", path = "{tests}" }}
share = 1.0
"""

_TORCH = threading.Lock()
"""Random weights are drawn by one thread at a time: torch has one seed for the process."""


@dataclass(frozen=True)
class Place:
    """The files of the study."""

    path: Path

    @property
    def results(self) -> Results:
        return Results(self.path / "results")

    def start(self, mixture: str, scale: str, seed: int) -> Path:
        return self.path / "starts" / start_name(mixture, scale, seed)

    def rows(self, kind: str) -> Path:
        """`kind`: "rows", which are trained on, or "tests". Written once."""
        path = self.path / f"{kind}.jsonl"
        if not path.exists():
            held_out, rest = problems(HELD_OUT)
            rows = [
                {"prompt": prompt(t), "answer": str(sum(t))} for t in (held_out if kind == "tests" else rest)
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def start_name(mixture: str, scale: str, seed: int) -> str:
    return f"start_{mixture.replace(' ', '-')}_{scale}_{SFT_STEPS}-steps_seed-{seed}"


def run_name(mixture: str, scale: str, kl: float, lr: float, seed: int) -> str:
    return f"run_{mixture.replace(' ', '-')}_{scale}_kl-{kl:g}_lr-{lr:g}_{STEPS}-steps_seed-{seed}"


# ---------------------------------------------------------------- making results


def make_start(place: Place, mixture: str, scale: str, seed: int) -> Result:
    """Pretraining from random weights on a mixture of formats, by `millrace sft`."""
    out = place.start(mixture, scale, seed)
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        base, data = Path(temporary) / "base", Path(temporary) / "data.jsonl"
        num_parameters = write_base(base, scale, seed)
        _, rest = problems(HELD_OUT)
        pairs = demonstrations(rest, MIXTURES[mixture], num=DEMONSTRATIONS, seed=seed)
        rows = [{"prompt": asked, "completion": text} for asked, text in pairs]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = Path(temporary) / "sft.toml"
        shape = {"lr": 4e-3, "optimizer": "muon"}
        config.write_text(SFT.format(steps=SFT_STEPS, seed=seed, base=base, out=out, data=data, **shape))
        run_logged([sys.executable, "-m", "millrace", "sft", config], Path(temporary) / "log")
    return {"num_parameters": num_parameters}


def write_base(path: Path, scale: str, seed: int) -> int:
    """Random weights and the tokenizer of the task. Returns the number of weights."""
    import torch
    from peers.start import untrained
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=WORDS[1], pad_token=WORDS[0], padding_side="left"
    )
    hidden, layers = SCALES[scale]
    with _TORCH:
        like = untrained(tokenizer, hidden=hidden, layers=layers)
        torch.manual_seed(seed)
        model = type(like)(like.config)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def make_run(place: Place, mixture: str, scale: str, kl: float, lr: float, seed: int) -> Result:
    """RL from a start, by `millrace train`. Figures of the held-out problems before and after, and curves."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "out"
        config = RUN.format(
            steps=STEPS,
            seed=seed,
            start=place.start(mixture, scale, seed),
            kl=kl,
            lr=lr,
            rows=place.rows("rows"),
            tests=place.rows("tests"),
            extract=ANSWER,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            held_out=HELD_OUT,
            samples=SAMPLES,
        )
        events = [event for event in train(config, out) if event["kind"] == "step"]
        if len(events) != STEPS:
            raise SystemExit(f"{run_name(mixture, scale, kl, lr, seed)}: {len(events)} of {STEPS} steps")
        with LedgerReader(out / "run" / "ledger.sqlite") as ledger:
            before, after = evaluated(ledger, 0), evaluated(ledger, STEPS)
            points = list(curve(ledger))
    metrics = [event["metrics"] for event in events]
    named = {"mixture": mixture, "scale": scale, "kl": kl, "lr": lr, "seed": seed}
    return _short(
        named
        | {"start": asdict(before), "end": asdict(after), "curve": points}
        | {"token_entropy": [mean([m["entropy"] for m in part]) for part in windows(metrics)]}
    )


def evaluated(ledger: LedgerReader, version: int) -> Tally:
    """Of the samples of held-out problems, without the greedy completions."""
    rows: dict[int, list[Answer]] = {}
    for attempt in ledger.attempts("held-out", version):
        if attempt.attempt:
            right = attempt.reward == 1.0
            rows.setdefault(attempt.prompt_index, []).append((format_of(text_of(attempt.tokens)), right))
    return Tally.of(list(rows.values()))


def curve(ledger: LedgerReader) -> Iterator[list[float]]:
    """Of every window of steps: the shares of the formats in its batches, and the mean reward."""
    batches: dict[int, list[Answer]] = {}
    for group in ledger.groups():
        for member in group.members:
            if member.trained_version is not None:
                right = member.reward == 1.0
                one = format_of(text_of(member.columns.tokens)), right
                batches.setdefault(member.trained_version, []).append(one)
    for part in windows([batches[version] for version in sorted(batches)]):
        tally = Tally.of([[one for batch in part for one in batch]])
        yield [*(tally.shares[form] for form in FORMATS), tally.pass_1]


def windows(values: list[Any]) -> Iterator[list[Any]]:
    return (values[i : i + WINDOW] for i in range(0, len(values), WINDOW))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _short(tree: Any) -> Any:
    """With numbers of four digits."""
    if isinstance(tree, dict):
        return {name: _short(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_short(value) for value in tree]
    return round(tree, 4) if isinstance(tree, float) else tree


# ---------------------------------------------------------------- showing them


def write_plots(runs: list[Result], out: Path) -> list[Path]:
    """One for each scale without KL and with an even mixture, and one for each scale by KL."""
    out.mkdir(parents=True, exist_ok=True)
    written, by_cell = [], cells(runs)
    for scale in SCALES:
        found = {
            kl: each for (*which, kl, lr), each in by_cell.items() if (*which, lr) == ("even", scale, LR)
        }
        if not found:
            continue
        shares = [_line(form, found.get(0.0, []), column) for column, form in enumerate(FORMATS)]
        kls = [_line(f"KL {kl:g}", each, None) for kl, each in found.items()]
        for name, title, lines in (
            ("shares", "share of each format, no KL", shares),
            ("kl", "share of the amplified format", kls),
        ):
            path = out / f"echo-{name}-{scale}.svg"
            save_chart(path, f"{scale} model: {title}", lines, (0.0, float(STEPS)), x_label="step")
            written.append(path)
    return written


def _line(label: str, runs: list[Result], column: int | None) -> Line:
    """The mean over seeds, with the least and the largest. `column` None: the most frequent at the end."""
    lines = []
    for run in runs:
        which = int(np.argmax(run["curve"][-1][: len(FORMATS)])) if column is None else column
        y = np.array([run["start"]["shares"][FORMATS[which]], *(point[which] for point in run["curve"])])
        lines.append(Line("", np.array([0.0, *((i + 0.5) * WINDOW for i in range(len(y) - 1))]), y))
    return group_line(label, lines, Band.RANGE)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--results", action="store_true", help="show the results in the repository")
    parser.add_argument("--kept", action="store_true", help="show what is kept so far")
    parser.add_argument("--write", action="store_true", help="put all of it into the repository")
    options = parser.parse_args()
    path = directory(STUDY)
    if options.results:
        runs = json.loads((RESULTS / "echo_chamber.json").read_text())
    else:
        if not options.kept:
            complete(Place(path), options.seeds, options.at_once)
        runs = kept(Place(path), options.seeds)
    require(runs, "no run is kept yet")
    print(tables(runs))
    for plot in write_plots(runs, IMAGES if options.write else path / "plots"):
        say(f"plot: {plot}")
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        lines = ",\n".join(json.dumps(run) for run in runs)
        (RESULTS / "echo_chamber.json").write_text(f"[\n{lines}\n]\n")
        write_tables(PAGE, "echo_chamber.py", tables(runs))
    report(figures(runs), as_json=options.json)


def complete(place: Place, num_seeds: int, at_once: int) -> None:
    """The start models that a phase needs and its runs, seed by seed; then the next phase."""
    for phase, seed in itertools.product(PHASES, range(num_seeds)):
        starts = dict.fromkeys(cell[:2] for cell in phase)
        place.results.complete(
            {start_name(*one, seed): partial(make_start, place, *one, seed) for one in starts},
            at_once=at_once,
        )
        place.results.complete(
            {run_name(*cell, seed): partial(make_run, place, *cell, seed) for cell in phase},
            at_once=at_once,
        )


def kept(place: Place, num_seeds: int) -> list[Result]:
    """The runs that are kept, those of a cell together."""
    mixtures = list(MIXTURES)
    shown = sorted(itertools.chain(*PHASES), key=lambda c: (mixtures.index(c[0]), -c[3], c[2]))
    names = [run_name(*cell, seed) for cell in shown for seed in range(num_seeds)]
    return list(place.results.all(names).values())


if __name__ == "__main__":
    main()
