"""A mixture of tasks: exact shares, rows by part, a reward for each part, and its metrics."""

from __future__ import annotations

import asyncio
import json
import string
from collections import Counter

import pytest

from millrace.config.load import load
from millrace.config.schema import Config
from millrace.config.tables.task import BLOCK
from millrace.conversations.tokenizer import load_tokenizer, make_character_tokenizer
from millrace.core.errors import ConfigError, RewardError
from millrace.core.types import Finish, ScoreRequest
from millrace.episodes.reward_worker import TaskRewardWorker
from millrace.evaluation.evaluate import held_out_config
from millrace.run.content_digests import content_digests
from millrace.tasks.parts import place
from millrace_curation.task_rows import read_candidates

WORDS = """
async def reward(completion, answer):
    return {"reward": float(len(completion)), "letters": len(completion)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_character_tokenizer(path, string.digits + string.ascii_letters + string.punctuation + " \n")
    return path


@pytest.fixture
def tree(model, tmp_path):
    """Three rows of sums with the exact reward, and five words with a reward of their own, one to three."""
    for name, rows in {"sums": 3, "words": 5}.items():
        lines = [json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) for i in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "own.py").write_text(WORDS)
    parts = [
        {"name": name, "weight": weight, "task": {"kind": "file", "path": str(tmp_path / f"{name}.jsonl")}}
        for name, weight in (("sums", 1.0), ("words", 3.0))
    ]
    parts[1]["reward"] = {"kind": "function", "path": f"{tmp_path / 'own.py'}:reward"}
    return {
        "model": {"path": str(model)},
        "task": {"kind": "mixture", "parts": parts},
        "reward": {"kind": "exact", "timeout_s": 3.0},
    }


def row_ids(worker, num):
    return asyncio.run(worker.row_ids(list(range(num))))


def config_of(tree):
    return Config.model_validate_json(json.dumps(tree))


@pytest.mark.parametrize("weights", [(1, 3), (1, 1, 1), (0.02, 5, 7)])
def test_the_shares_are_exact_in_every_block(tree, weights):
    part = tree["task"]["parts"][0]
    tree["task"]["parts"] = [part | {"name": f"p{i}", "weight": w} for i, w in enumerate(weights)]
    quotas = config_of(tree).task.quotas
    assert sum(quotas) == BLOCK
    assert all(abs(q - BLOCK * w / sum(weights)) < 1 for q, w in zip(quotas, weights, strict=True))
    for block in (0, 1, 77):
        placed = [place(block * BLOCK + i, quotas, seed=5) for i in range(BLOCK)]
        counts = Counter(index for index, _ in placed)
        assert tuple(counts[index] for index in range(len(quotas))) == quotas
        for index, quota in enumerate(quotas):
            positions = sorted(position for each, position in placed if each == index)
            assert positions == list(range(block * quota, (block + 1) * quota))


def test_the_order_of_the_parts_depends_on_seed_and_block():
    orders = {
        tuple(place(block * BLOCK + i, (250, 750), seed)[0] for i in range(50))
        for seed, block in ((0, 0), (0, 1), (1, 0))
    }
    assert len(orders) == 3


def test_each_part_draws_its_rows_once_per_epoch_of_its_own_and_names_them(tree):
    ids = row_ids(TaskRewardWorker(tree, limit_memory=False), BLOCK)
    sums = Counter(one for one in ids if one.startswith("sums/"))
    words = Counter(one for one in ids if one.startswith("words/"))
    assert len(sums) == 3 and sum(sums.values()) == 250 and max(sums.values()) - min(sums.values()) <= 1
    assert len(words) == 5 and set(words.values()) == {150}
    assert "sums/sums.jsonl:1" in sums
    assert ids[:200] == row_ids(TaskRewardWorker(tree, limit_memory=False), 200)


def test_each_part_has_its_reward_and_metrics_in_the_order_of_the_requests(tree):
    worker = TaskRewardWorker(tree, limit_memory=False)
    tokenizer, ids = load_tokenizer(tree["model"]["path"]), row_ids(worker, 12)

    def request(group_id, text):
        return ScoreRequest(100 + group_id, group_id, [*tokenizer.encode(text), 1], Finish.STOP)

    async def collect():
        answers = [str(int(row_id.rpartition(":")[2]) - 1) for row_id in ids]
        requests = [request(group_id, answer) for group_id, answer in enumerate(answers)]
        return [pair async for pair in worker.score(requests)]

    scored = asyncio.run(collect())
    assert [trajectory_id for trajectory_id, _ in scored] == [100 + i for i in range(12)]
    assert {row_id.partition("/")[0] for row_id in ids} == {"sums", "words"}
    for row_id, (_, score) in zip(ids, scored, strict=True):
        name = row_id.partition("/")[0]
        own = {"letters": 1.0} if name == "words" else {}
        shares = {"sums/share": float(name == "sums"), "words/share": float(name == "words")}
        assert score.metrics == own | shares | {f"{name}/reward": 1.0, f"{name}/pass_rate": 1.0}


def test_a_run_without_a_mixture_has_rows_and_metrics_as_before(tree):
    tree["task"] = tree["task"]["parts"][0]["task"]
    worker = TaskRewardWorker(tree, limit_memory=False)
    assert set(row_ids(worker, 3)) == {f"sums.jsonl:{i}" for i in (1, 2, 3)}

    async def collect():
        return [score async for _, score in worker.score([ScoreRequest(0, 0, [5], Finish.STOP)])]

    assert asyncio.run(collect())[0].metrics == {}


def test_limits_are_of_all_parts(tree):
    assert {part.reward.timeout_s for part in config_of(tree).by_part.values()} == {3.0}
    tree["task"]["parts"][1]["reward"]["memory_mb"] = 100
    with pytest.raises(ValueError, match=r"`task.parts` \(words\): `memory_mb` is a limit of all parts"):
        config_of(tree)


def test_parts_that_make_no_sense_are_refused_by_name(tree):
    parts = tree["task"]["parts"]
    with pytest.raises(ValueError, match=r"`task.parts` \(sums\): it is the name of two"):
        config_of(tree | {"task": {"kind": "mixture", "parts": [parts[0], parts[0]]}})
    with pytest.raises(ValueError, match=r"\(sums\): `weight` \(0.0001\) is less than one prompt in 1000"):
        config_of(tree | {"task": {"kind": "mixture", "parts": [parts[0] | {"weight": 1e-4}, parts[1]]}})
    with pytest.raises(ValueError, match=r'`task.parts` \(words\): `reward.kind` "gym" needs'):
        config_of(
            tree | {"task": {"kind": "mixture", "parts": [parts[0], parts[1] | {"reward": {"kind": "gym"}}]}}
        )


def test_a_reward_that_cannot_be_loaded_names_its_part(tree, tmp_path):
    (tmp_path / "own.py").write_text("def reward(completion, missing):\n    return 1.0\n")
    with pytest.raises(RewardError, match=r"`task.parts` \(words\)"):
        TaskRewardWorker(tree, limit_memory=False)


def test_what_needs_one_task_refuses_a_mixture_by_name(tree):
    config = config_of(tree)
    with pytest.raises(ConfigError, match="curate its parts one by one"):
        read_candidates(config, None)
    with pytest.raises(ConfigError, match="evaluate on one task"):
        held_out_config(config, None, seed=0, data_seed=1)


def test_the_files_of_every_part_are_digested(tree, tmp_path):
    digests = content_digests(config_of(tree))
    assert {name for name in digests if name.startswith("task")} == {
        "task.parts.sums.task.path: sums.jsonl",
        "task.parts.words.task.path: words.jsonl",
    }


def test_paths_of_parts_are_relative_to_the_file_that_writes_them(tmp_path):
    (tmp_path / "run.toml").write_text(
        'model.path = "m"\ntask.kind = "mixture"\nreward.kind = "exact"\n'
        '[[task.parts]]\nname = "sums"\ntask = { kind = "file", path = "sums.jsonl" }\n'
    )
    [part] = load(tmp_path / "run.toml").task.parts
    assert part.task.path == str(tmp_path / "sums.jsonl")
