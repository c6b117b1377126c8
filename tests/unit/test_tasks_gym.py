"""Tasks of reasoning-gym: rows that nothing else decides, and scorers that pay for nothing."""

import random

import numpy as np
import pytest

from millrace.checks.preflight import contradictions
from millrace.config.schema import Config
from millrace.config.tables.task import GymRewardSection, GymTaskSection
from millrace.core.types import Failed, Scored
from millrace.rewards.reward_calls import Calls
from millrace.rewards.rewards import GymReward
from millrace.tasks import families
from millrace.tasks.asked_row import row_digest
from millrace.tasks.families import family_notes, read_families
from millrace.tasks.gym_task import GymTask

NAMED = "coin_flip", "complex_arithmetic", "game_of_life", "game_of_life_halting", "puzzle24"


def config_of(name="chain_sum", *, reward=None, **more):
    tree = {
        "model": {"path": "m"},
        "task": {"kind": "gym", "name": name},
        "reward": reward or {"kind": "gym"},
    }
    return Config.model_validate(tree | more)


def refusals(config):
    return [one for one in contradictions(config) if "false_positives" in one]


class Scorer:
    """A data set whose scorer raises on all texts but `knows`."""

    def __init__(self, *knows, error=ValueError("bad text")):
        self.knows, self.error = knows, error

    def score_answer(self, answer, entry):
        if answer not in self.knows:
            raise self.error
        return 1.0


def scored(dataset, text, row, run):
    task = GymTask(GymTaskSection(name="chain_sum", size=5), None)
    task.dataset = dataset
    calls = Calls(GymReward(GymRewardSection(), task), 60.0)
    return run(calls.score(text, row["answer"], row))


@pytest.fixture
def run():
    import asyncio

    return asyncio.run


# ---------------------------------------------------------------- scorers that raise


def test_a_text_on_which_the_scorer_raises_is_a_wrong_answer_if_the_scorer_can_score_its_row(run):
    assert scored(Scorer("4"), "four", {"answer": "4"}, run) == Scored(0.0)
    assert scored(Scorer("lorem ipsum"), "[1]", {"answer": None}, run) == Scored(0.0)


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), RecursionError("x")])
def test_a_scorer_that_cannot_score_its_own_row_has_failed(run, error):
    for answer in ("4", None):
        failed = scored(Scorer(error=error), "4", {"answer": answer}, run)
        assert isinstance(failed, Failed) and type(error).__name__ in failed.reason


@pytest.mark.parametrize("error", [ImportError("no scipy"), FileNotFoundError("words.txt")])
def test_what_the_machine_lacks_is_never_the_models_doing(run, error):
    assert isinstance(scored(Scorer("4", error=error), "5", {"answer": "4"}, run), Failed)


@pytest.mark.parametrize(
    ("name", "text"),
    [("prime_factorization", "two times three"), ("boxnet", "7"), ("boxnet", "null"), ("game_of_life", "1")],
)
def test_the_librarys_scorers_that_raise_on_ordinary_texts_give_nothing(run, name, text):
    task = GymTask(GymTaskSection(name=name, size=5), None)
    row = task.columns(0)
    calls = Calls(GymReward(GymRewardSection(), task), 60.0)
    assert run(calls.score(text, row["answer"], row)) == Scored(0.0)


# ---------------------------------------------------------------- families that pay for nothing


@pytest.mark.parametrize("name", NAMED)
def test_a_family_that_pays_for_nothing_is_refused_unless_one_means_it(name):
    [refusal] = refusals(config_of(name))
    assert name in refusal and 'allow = ["false_positives"]' in refusal
    assert refusals(config_of(name, allow=["false_positives"])) == []
    assert refusals(config_of(name, reward={"kind": "exact"})) == []
    assert any("a wrong answer" in note for note in family_notes(config_of(name)))


def test_a_threshold_above_what_wrong_answers_earn_is_enough():
    assert refusals(config_of("game_of_life", reward={"kind": "gym", "threshold": 1.0})) == []
    assert refusals(config_of("coin_flip", reward={"kind": "gym", "threshold": 1.0}))


def test_every_place_of_a_family_is_looked_at():
    member = {"name": "right", "reward": {"kind": "gym"}}
    assert refusals(config_of("coin_flip", reward={"kind": "sum", "members": [member]}))
    task = {"kind": "gym", "name": "coin_flip"}
    assert refusals(config_of(evaluations=[{"name": "flips", "every": 1, "task": task}]))
    parts = [{"name": "a", "weight": 1, "task": task}, {"name": "b", "weight": 1, "task": task}]
    assert refusals(config_of(task={"kind": "mixture", "parts": parts}))


def test_ordinary_families_are_not_refused():
    for name in ("chain_sum", "gcd", "spell_backward", "letter_counting", "basic_arithmetic", "leg_counting"):
        assert refusals(config_of(name)) == []


# ---------------------------------------------------------------- what is said of a family


def test_the_table_has_every_family_of_its_version():
    from reasoning_gym.factory import DATASETS

    assert set(read_families().families) == set(DATASETS)


@pytest.mark.parametrize("name", ["propositional_logic", "rubiks_cube", "boxnet", "graph_color", "rush_hour"])
def test_a_family_without_references_is_named(name):
    assert any("no reference answer" in note for note in family_notes(config_of(name)))


@pytest.mark.parametrize("name", ["tower_of_hanoi", "string_splitting", "coin_flip"])
def test_few_distinct_prompts_are_said(name):
    assert any(
        "prompts are distinct" in note for note in family_notes(config_of(name, reward={"kind": "exact"}))
    )


def test_another_version_of_the_library_is_said(monkeypatch):
    assert not any("is installed" in note for note in family_notes(config_of()))
    monkeypatch.setattr(families, "version", lambda name: "9.9.9")
    [note, *_] = family_notes(config_of())
    assert "reasoning-gym 9.9.9 is installed" in note and read_families().version in note
    assert list(family_notes(config_of(task={"kind": "file", "path": "x"}, reward={"kind": "exact"}))) == []


# ---------------------------------------------------------------- rows that nothing else decides


@pytest.mark.parametrize("name", ["codeio", "list_functions", "pool_matrix", "bf", "tower_of_hanoi"])
def test_making_and_scoring_rows_changes_no_generator_and_prints_nothing(name, capsys, run):
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    task = GymTask(GymTaskSection(name=name, size=10), None)
    calls = Calls(GymReward(GymRewardSection(), task), 60.0)
    for index in range(3):
        row = task.columns(index)
        run(calls.score("nothing", row["answer"], row))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["list_functions", "knights_knaves", "pool_matrix"])
def test_a_row_depends_on_no_row_before_it_and_on_no_generator(name):
    def digests(order, seed):
        random.seed(seed)
        np.random.seed(seed)
        task = GymTask(GymTaskSection(name=name, size=30), None)
        return {index: row_digest(task.columns(index)) for index in order}

    assert digests(range(30), 1) == digests(reversed(range(30)), 2)
