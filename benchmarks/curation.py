"""What the filters of `millrace curate` find of planted copies, and what curated and screened runs save.

    python benchmarks/curation.py [--rows 10000] [--seed 0] [--edits 1] [--runs 5] [--json]

Rows are stories with a question at the end, as data sets of word problems have. Each has 3 to 6 sentences of
34 templates, with names, things, places, adjectives and numbers drawn by Zipf's law. So many rows share
sentences but for a few words. 30 % of the rows stand in one frame ("think step by step ..."). 4 % tell the
story of an earlier row and ask another question, with the same numbers. 4 % are an earlier row with other
numbers. None of these is a copy: a filter that looks at most of the words alone would drop them.

Planted near copies (5 % of the rows, each of a row of its own) have one edit, or two if the story has 50
words: a misspelled word, one word for another, case and punctuation, a polite beginning, a word left out or
doubled. With two edits in shorter stories too (`--edits 2`), more copies are less similar than 0.8. Planted
contaminated rows (3 %) have the text of one of 500 rows of an evaluation set that the same generator writes:
whole between other sentences, its first two thirds, or whole with every tenth word replaced.

duplicates_found    share of the planted near copies that are dropped as duplicates of any kind
falsely_found       share of the other rows that are dropped so
contaminated_found  share of the planted contaminated rows that are dropped as contaminated
falsely_contaminated  share of the other rows that are dropped so
rows_per_s          rows over the wall time of all filters of one thread, without tokenization
speedup_to_reward   generated tokens until a reward, of a run on all rows over one that is curated and
                    screened (`curated_runs.py`). Mean over `--runs` seeds; finished runs are kept
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import kept_directory, parser_of, report, sized
from curated_runs import speedup

from millrace_curation.candidate import CandidateRow, Reason
from millrace_curation.curate import CurationOptions, filtered
from millrace_curation.filters import EvaluationText


def listed(words: str) -> list[str]:
    return words.split()


NAMES = listed("""
Natalia Ben Priya Omar Lucia Kenji Fatima Tom Ingrid Mateo Aisha Piotr Chloe Ravi Hana Diego Zoe
Samir Greta Kofi Mei Anton Leila Jonas Rosa Tariq Emma Viktor Nadia Felix Yuki Carlos Maya Oskar
Ines Bilal Clara Hugo""")
THINGS = listed("""
apples marbles stamps pencils tickets candles bricks roses lemons cards shells buttons loaves eggs
coins ribbons tiles seeds postcards batteries notebooks cupcakes balloons oranges stickers bottles
cushions lanterns spoons kites beads nails jars scarves mugs lamps crayons puzzles""")
PLACES = listed("""
market bakery library harbor museum orchard workshop station theater garden stadium clinic bookshop
farm castle warehouse gallery cinema kitchen playground office village island""")
LOOKS = listed("""
red old tiny heavy bright broken wooden round cheap fresh striped smooth rare dusty golden plain
square shiny soft cold narrow curious familiar modern""")
DAYS = listed("""
Monday Tuesday Wednesday Thursday Friday Saturday Sunday""")
SETTINGS = """{N} collects {l} {t} and keeps {n} of them in a box near the {p}.
On {d} {N} buys {n} {l} {t} at the {p} with a friend called {M}.
A {p} in the north of town sells {n} {l} {t} on a usual {d}.
{N} and {M} share a {l} table at the {p}, where {n} {t} are waiting.
There are {n} {t} on the shelf of the {p}, and {N} wants to count all {l} ones.
Every {d} morning, {N} takes the bus to the {p} and carries {n} {t} in a {l} bag.
The {l} {p} received {n} crates of {t} from {N} before {d}.
In the {l} room behind the {p}, {M} discovers {n} forgotten {t}.
{M} has been saving {t} since last {d} and owns {n} already.
For the party at the {p}, {N} needs {n} {l} {t} by {d}.""".splitlines()
ACTIONS = """Later {M} gives away {n} of the {l} {t} to children from the {p}.
{N} loses {n} {t} on the way to the {p}, but never notices.
Each of the {n} visitors brings {n} more {t} for {M}.
The price of {l} {t} goes up by {n} percent after {d}.
{M} trades {n} {t} for a {l} ladder that {N} had painted.
Half of what is left goes to the {p}, and {n} {t} turn out to be {l}.
On {d}, {n} new boxes arrive, each of them with {n} {l} {t} inside.
Because of the rain, {N} can only carry {n} {t} an hour to the {p}.
{N} works for {n} hours and packs {n} {t} in every one of them.
Someone from the {p} returns {n} {l} {t} and says sorry to {M}.
{M} breaks {n} of them, and a {l} dog hides {n} more behind the {p}.
A neighbor called {N} doubles the number of {t} with help from the {p}.
The {l} {t} are put into bags of {n}, and {M} ties each bag.
{N} eats nothing until {n} {t} are sorted by someone at the {p}.""".splitlines()
QUESTIONS = """How many {t} does {N} have at the end of {d}?
How much money did {M} spend on {l} {t} in all?
What share of the {t} is still at the {p}?
If nothing else changes, how many {t} will {M} own next {d}?
How many hours must {N} work before all the {t} are {l}?
How many more {t} than {M} does {N} now have?
Find the least number of bags that {M} needs for the {t}.
What is the average number of {t} that the {p} gets a day?
How many {l} {t} would be left if {M} had stayed at the {p}?
By how many percent did the number of {t} at the {p} grow?""".splitlines()
FRAME = "Solve the problem below. Think step by step, check every line, and box the final answer at the end: "
POLITE = ("Please help me with this one. ", "Here is a question. ", "I have a task for you: ", "Hi! ")
EVALUATIONS = sized(500, 50)
COPIES, CONTAMINATED, FRAMED, SAME_STORY, SAME_TEXT = 0.05, 0.03, 0.3, 0.04, 0.04


@dataclass
class Writer:
    """Writes stories. A name, a thing and a place stay the same within one."""

    draw: random.Random
    weights: dict[int, list[float]] = field(default_factory=dict)

    def pick(self, words: list[str]) -> str:
        weights = self.weights.setdefault(len(words), [1 / (rank + 3) for rank in range(len(words))])
        return self.draw.choices(words, weights)[0]

    def sentence(self, templates: list[str], cast: dict[str, str]) -> str:
        text = self.draw.choice(templates)
        while "{n}" in text:
            text = text.replace("{n}", str(round(self.draw.paretovariate(0.6)) % 5000 + 2), 1)
        return text.format(**{**cast, "l": self.pick(LOOKS), "d": self.pick(DAYS)})

    def cast(self) -> dict[str, str]:
        return {"N": self.pick(NAMES), "M": self.pick(NAMES), "t": self.pick(THINGS), "p": self.pick(PLACES)}

    def story(self, cast: dict[str, str]) -> list[str]:
        sentences = [self.sentence(SETTINGS, cast)]
        sentences += [self.sentence(ACTIONS, cast) for _ in range(self.draw.randint(1, 4))]
        return [*sentences, self.sentence(QUESTIONS, cast)]


def edited(draw: random.Random, text: str, edits_min: int) -> str:
    """A near copy."""
    long = len(text.replace(FRAME, "").split()) >= 50
    for edit in draw.sample(EDITS, 2 if long else edits_min):
        text = edit(draw, text)
    return text


def _misspelled(draw: random.Random, text: str) -> str:
    def swap(word: str) -> str:
        place = draw.randrange(1, len(word) - 1)
        return word[:place] + word[place + 1] + word[place] + word[place + 2 :]

    return _changed(draw, text, swap)


def _changed(draw: random.Random, text: str, change: Callable[[str], str]) -> str:
    """One word of five letters or more is changed."""
    words = text.split(" ")
    place = draw.choice([place for place, word in enumerate(words) if word.isalpha() and len(word) > 4])
    return " ".join([*words[:place], change(words[place]), *words[place + 1 :]])


def _repunctuated(draw: random.Random, text: str) -> str:
    text = draw.choice([text.upper, text.lower, text.title])()
    return text.replace(",", draw.choice(["", " -", ";"])).replace(". ", draw.choice([".\n", ".  ", "! "]))


EDITS: list[Callable[[random.Random, str], str]] = [
    _misspelled,
    lambda draw, text: _changed(draw, text, lambda word: draw.choice(LOOKS)),
    _repunctuated,
    lambda draw, text: draw.choice(POLITE) + text,
    lambda draw, text: _changed(draw, text, lambda word: ""),
    lambda draw, text: _changed(draw, text, lambda word: f"{word} {word}"),
]


def leaked(writer: Writer, text: str) -> str:
    """A training text with the text of an evaluation in it."""
    draw, cast = writer.draw, writer.cast()
    match draw.randrange(3):
        case 0:
            before, after = writer.sentence(SETTINGS, cast), writer.sentence(ACTIONS, cast)
            return f"{before} {text} {after}"
        case 1:
            words = text.split()
            return " ".join(words[: len(words) * 2 // 3])
    words = text.split()
    for place in range(9, len(words), 10):
        words[place] = draw.choice(LOOKS)
    return " ".join(words).lower()


Written = tuple[list[CandidateRow], set[int], set[int], list[EvaluationText]]


def written(num: int, seed: int, edits_min: int) -> Written:
    """Rows, the indices of planted copies and of planted contaminated rows, and the evaluation set."""
    draw = random.Random(seed)
    writer = Writer(draw)
    tests = [" ".join(writer.story(writer.cast())) for _ in range(EVALUATIONS)]
    stories: list[list[str]] = []
    while len(stories) < round(num * (1 - COPIES - CONTAMINATED)):
        kind, cast = draw.random(), writer.cast()
        if stories and kind < SAME_STORY:
            stories.append([*draw.choice(stories)[:-1], writer.sentence(QUESTIONS, cast)])
        elif stories and kind < SAME_STORY + SAME_TEXT:
            old = draw.choice(stories)
            stories.append([_renumbered(draw, sentence) for sentence in old])
        else:
            stories.append(writer.story(cast))
    texts = [(FRAME if draw.random() < FRAMED else "") + " ".join(story) for story in stories]
    copies = [edited(draw, text, edits_min) for text in draw.sample(texts, round(num * COPIES))]
    leaks = [leaked(writer, draw.choice(tests)) for _ in range(num - len(texts) - len(copies))]
    marked = [(text, 0) for text in texts] + [(text, 1) for text in copies] + [(text, 2) for text in leaks]
    order = sorted(range(len(marked)), key=lambda place: (marked[place][1] == 1, draw.random()))
    rows = [
        CandidateRow(i, f"rows:{i}", {}, text, text, range(9))
        for i, text in enumerate(marked[p][0] for p in order)
    ]
    of = {kind: {i for i, place in enumerate(order) if marked[place][1] == kind} for kind in (1, 2)}
    return rows, of[1], of[2], [EvaluationText(f"test:{i}", text) for i, text in enumerate(tests)]


def _renumbered(draw: random.Random, sentence: str) -> str:
    words = sentence.split(" ")
    return " ".join(str(int(word) + draw.randint(1, 9)) if word.isdigit() else word for word in words)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=sized(10_000, 400))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edits", type=int, default=1, choices=(1, 2))
    parser.add_argument("--runs", type=int, default=sized(5, 1), help="seeds of the runs; 0: no runs")
    arguments = parser.parse_args()
    rows, copies, leaks, tests = written(arguments.rows, arguments.seed, arguments.edits)
    began_s = time.perf_counter()
    drops = filtered(rows, CurationOptions(against=tests), most=1000)
    took_s = time.perf_counter() - began_s
    repeated = {i for i, drop in drops.items() if drop.reason in (Reason.DUPLICATE, Reason.NEAR_DUPLICATE)}
    contaminated = {i for i, drop in drops.items() if drop.reason is Reason.CONTAMINATED}
    # A leak may be a copy of another leak of the same evaluation text, and is then dropped as such.
    result = {
        "rows": len(rows),
        "words_of_a_row": sum(len(row.text.split()) for row in rows) / len(rows),
        "duplicates_found": len(repeated & copies) / len(copies),
        "falsely_found": len(repeated - copies - leaks) / (len(rows) - len(copies) - len(leaks)),
        "contaminated_found": len(contaminated & leaks) / len(leaks - repeated),
        "falsely_contaminated": len(contaminated - leaks - copies) / (len(rows) - len(leaks) - len(copies)),
        "rows_per_s": len(rows) / took_s,
    }
    if arguments.runs:
        result |= speedup(arguments.runs, kept_directory())
    report(result, as_json=arguments.json)


if __name__ == "__main__":
    main()
