"""What a real model and its tokenizer have and small ones of characters do not: merges, parts of characters,
several ends, ids without text. What was sampled is what is trained."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from millrace.algorithms import build
from millrace.config.load import load
from millrace.config.tables.algorithms import PolicyGradient
from millrace.config.tables.training import Optimizer
from millrace.core.completion.columns import TokenColumns, token_array
from millrace.core.turns.end_ids import end_ids
from millrace.core.turns.stop_strings import StopStrings
from millrace.core.types import (
    Batch,
    Finish,
    Sampling,
    Scored,
    ScoreRequest,
    TrainGroup,
    TrainSequence,
    Work,
)
from millrace.engines.own.load_engine import load_engine
from millrace.episodes.environment import SampledTurn
from millrace.episodes.gateway.calls import Call, ChatTurn
from millrace.episodes.gateway.conversation import Conversation
from millrace.episodes.gateway.rendering import make_rendering
from millrace.episodes.gateway.replies import Replies
from millrace.episodes.harmony import make_chat_bridge
from millrace.episodes.reward_worker import TaskRewardWorker
from millrace.rollout.model_tokens import text_decoder
from millrace.tasks.tasks import make_task
from millrace.trainer.batch.batch_step import StepSettings
from millrace.trainer.model import load_model
from millrace.trainer.trainer import PolicyTrainer

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
TEXTS = ["7 + 5 =", "  two spaces", "\n\nlines\n", "\ttab\tx", "日本語 🦙🏽", "é ‍ 'll {x}", " "]
BROKEN = "\N{REPLACEMENT CHARACTER}"
NUM_PADDED = 64
Message = dict[str, str]


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="module")
def sampled(tokenizer: Any) -> list[int]:
    """Ids that no text has: a word in two parts, the middle of a character, two special tokens."""
    word = [*tokenizer.encode("c"), *tokenizer.encode("ooked")]
    assert tokenizer.encode("cooked") != word
    parts = [tokenizer.encode("é")[0], tokenizer.encode("🦙")[-1]] * 2
    parts = [one for one in parts if BROKEN in tokenizer.decode([one])]
    ids = [*word, *parts, *tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<file_sep>"]), *word]
    assert parts and tokenizer.encode(tokenizer.decode(ids)) != ids
    return ids


# ---------------------------------------------------------------- prompts


def user(text: str) -> Message:
    return {"role": "user", "content": text}


TALK = [user("a"), {"role": "assistant", "content": "b"}]
SYSTEM = {"role": "system", "content": "Be brief."}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], Any], Callable[[str], list[Message]]]] = {
    "text": ({"chat": True}, str, lambda text: [user(text)]),
    "template": (
        {"chat": True, "template": "{prompt} Answer with {n}."},
        str,
        lambda text: [user(f"{text} Answer with 1.")],
    ),
    "system": ({"chat": True, "system": "Be brief."}, str, lambda text: [SYSTEM, user(text)]),
    "messages": ({}, lambda text: [user(text)], lambda text: [user(text)]),
    "system and messages": (
        {"system": "Be brief."},
        lambda text: [user(text)],
        lambda text: [SYSTEM, user(text)],
    ),
    "several turns": (
        {},
        lambda text: [SYSTEM, *TALK, user(text)],
        lambda text: [SYSTEM, *TALK, user(text)],
    ),
    "a column of messages": (
        {"prompt": "messages", "answer": None},
        lambda text: [SYSTEM, user(text)],
        lambda text: [SYSTEM, user(text)],
    ),
    "an answer at the end": (
        {"answer": "prompt"},
        lambda text: [user(text), {"role": "assistant", "content": "7"}],
        lambda text: [user(text)],
    ),
    "parts of text": (
        {},
        lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}],
        lambda text: [user(text)],
    ),
    "human and gpt": (
        {},
        lambda text: [
            {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"},
            {"from": "human", "value": text},
        ],
        lambda text: [*TALK, user(text)],
    ),
}
"""Keys of the task; the prompt that a row has; the messages that the model is to see."""


@pytest.mark.parametrize("source", ["file", "function"])
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_what_the_tokenizer_makes_of_its_messages(
    form: str, source: str, real_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    keys, prompt, messages = FORMS[form]
    rows = [{keys.get("prompt", "prompt"): prompt(text), "n": 1, "answer": "7"} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "own.py").write_text(f"def rows():\n    return {rows!r}\n")
    path = {"file": "rows.jsonl", "function": "own.py:rows"}[source]
    task = {"kind": source, "path": f"{tmp_path}/{path}", **keys}
    reward = {"kind": "pattern", "pattern": "7"}
    config = {"model": {"path": str(real_model)}, "task": task, "reward": reward}
    prompts = asyncio.run(TaskRewardWorker(config, limit_memory=False).prompts(list(range(len(rows)))))
    expected = [rendered(tokenizer, messages(text)) for text in TEXTS]
    assert sorted(prompt.tokens.tolist() for prompt in prompts) == sorted(expected)


def test_a_prompt_without_chat_is_the_ids_of_its_text(
    real_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    spoken = [text for text in TEXTS if text.strip()]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in spoken))
    task = {"kind": "file", "path": f"{tmp_path}/rows.jsonl", "answer": None}
    reward = {"kind": "pattern", "pattern": "7"}
    config = {"model": {"path": str(real_model)}, "task": task, "reward": reward}
    prompts = asyncio.run(TaskRewardWorker(config, limit_memory=False).prompts(list(range(len(spoken)))))
    assert sorted(prompt.tokens.tolist() for prompt in prompts) == sorted(map(tokenizer.encode, spoken))


def rendered(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("name", ["arithmetic", "form", "tool"])
def test_the_prompts_of_an_example_are_those_of_the_chat_template(
    name: str, real_model: Path, tokenizer: Any
) -> None:
    config = load(ROOT / "examples" / "real" / f"{name}.toml", [f"model.path={real_model}"])
    prompts = asyncio.run(TaskRewardWorker(config.model_dump(), limit_memory=False).prompts([0, 1, 2]))
    rows = {
        row.row_id(n): row.columns(n)["prompt"]
        for row in [make_task(config.one_task, tokenizer)]
        for n in range(row.rows)
    }
    for prompt in prompts:
        given = rows[prompt.row_id]
        assert prompt.tokens.tolist() == rendered(
            tokenizer, given if isinstance(given, list) else [user(given)]
        )


@pytest.mark.parametrize("answer", [*TEXTS, ""])
def test_a_conversation_by_turns_has_the_ids_of_the_whole_one(
    answer: str, sampled: list[int], real_model: Path, tokenizer: Any
) -> None:
    """And what follows a turn is the same behind ids that no text has."""
    [end] = ends = end_ids(str(real_model), tokenizer)
    bridge = make_chat_bridge(tokenizer, "user", {}, (), ends)
    turn = [*tokenizer.encode("hello"), end]
    for messages in ([user("a")], [SYSTEM, *TALK, user("a")]):
        appended = bridge.after(turn, answer, messages)
        whole = rendered(tokenizer, [*messages, {"role": "assistant", "content": "hello"}, user(answer)])
        assert [*rendered(tokenizer, messages), *turn, *appended] == whole
        assert bridge.after([*sampled, end], answer, messages) == appended


def test_an_agent_goes_on_from_the_ids_that_were_sampled(
    sampled: list[int], real_model: Path, tokenizer: Any
) -> None:
    [end] = ends = end_ids(str(real_model), tokenizer)
    rendering = make_rendering(tokenizer, {}, ends)
    conversation, replies = Conversation(rendering), Replies(tokenizer, rendering.style, end_ids=ends)
    call = Call(messages=[ChatTurn(role="user", content="a")])
    place = conversation.place(call)
    reply = replies.make("one", call, place.context, SampledTurn([*sampled, end], [], "turn"))
    conversation.add(call, place, reply)
    said = ChatTurn(role="assistant", content=json.loads(json.dumps(reply.content)))
    later = conversation.place(Call(messages=[*call.messages, said, ChatTurn(role="user", content="\nb")]))
    assert BROKEN in reply.content and later.after is None
    assert later.context[: -len(later.ids)] == [*place.context, *sampled, end]


# ---------------------------------------------------------------- sampled ids


@pytest.fixture(scope="module")
def padded(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with more ids than its tokenizer has, as models have whose size is rounded up. Several ids
    end a turn, and only the generation configuration says so."""
    path = tmp_path_factory.mktemp("padded")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(real_model)
    model.resize_token_embeddings(model.config.vocab_size + NUM_PADDED, mean_resizing=False)
    model.save_pretrained(path)
    for file in real_model.glob("token*"):
        shutil.copy(file, path)
    shutil.copy(real_model / "chat_template.jinja", path)
    settings = json.loads((real_model / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 0, 7]}))
    return path


@pytest.fixture(scope="module")
def engine(padded: Path) -> Any:
    return load_engine(str(padded), device="cpu", slots=16, max_sequence_tokens=96)


def completed(engine: Any, works: Sequence[Work]) -> list[tuple[TokenColumns, Finish | None]]:
    columns = {work.trajectory_id: TokenColumns() for work in works}
    finishes = dict[int, Finish | None]()
    engine.submit(works)
    while engine.has_work or engine.has_finished:
        engine.step()
        for progress in engine.take_progress():
            columns[progress.trajectory_id].extend(progress.columns)
            finishes[progress.trajectory_id] = progress.finish
    return [(columns[work.trajectory_id], finishes[work.trajectory_id]) for work in works]


def works_of(prompt: Sequence[int], samplings: Sequence[Sampling], first: int) -> list[Work]:
    return [
        Work(n, n, 0, token_array(prompt), token_array(), sampling, seed=n)
        for n, sampling in enumerate(samplings, first)
    ]


def test_every_end_of_the_generation_configuration_ends_a_completion_and_one_in_the_prompt_none(
    engine: Any, tokenizer: Any
) -> None:
    prompt = rendered(tokenizer, [*TALK, user("go on <|endoftext|>")])
    assert prompt.count(2) == 4 and 0 in prompt  # an end of each message
    only = [Sampling(max_tokens=3, allowed_token_ids=(end,)) for end in (2, 0, 7, 1)]
    only.append(Sampling(max_tokens=3, allowed_token_ids=(0,), ignore_eos=True))
    outcomes = [
        (column.tokens.tolist(), finish) for column, finish in completed(engine, works_of(prompt, only, 0))
    ]
    assert outcomes[:3] == [([end], Finish.STOP) for end in (2, 0, 7)]
    assert outcomes[3:] == [([1] * 3, Finish.LENGTH), ([0] * 3, Finish.LENGTH)]


def test_trained_ids_are_the_sampled_ones_also_those_that_no_text_has(
    engine: Any, padded: Path, sampled: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    """The trainer's log-probs are those of transformers for these very ids."""
    model, prompt = AutoModelForCausalLM.from_pretrained(padded), rendered(tokenizer, [user("Hello")])
    last = len(tokenizer) + NUM_PADDED - 1
    completions = [
        column for column, _ in completed(engine, works_of(prompt, [Sampling(max_tokens=8)] * 2, 20))
    ]
    completions += [
        TokenColumns.of(ids, logprobs_of(model, prompt, ids), 0)
        for ids in ([*sampled, 2], [len(tokenizer), *sampled, last])
    ]
    sequences = [TrainSequence(n, column, float(n % 2), False) for n, column in enumerate(completions)]
    settings = StepSettings(Optimizer(lr=1e-6), 4096, 32, 1.0, torch.float32, torch.float32)
    trainer = PolicyTrainer(load_model(padded, torch.device("cpu")), build(PolicyGradient()), settings)
    result = trainer.step(Batch(0, [TrainGroup(0, token_array(prompt), sequences)]), rejected_dir=tmp_path)
    _, largest, tokens = result.logprob_gap[0]
    assert tokens == sum(map(len, completions)) and largest < 2e-4


def logprobs_of(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), list(ids)].tolist()


def test_a_reward_gets_the_text_of_ids_that_are_no_text(
    padded: Path, sampled: list[int], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def rows():\n    return [{'prompt': 'a', 'answer': 'b'}]\n"
        "def reward(completion, answer):\n"
        f"    return float(completion.encode().decode().startswith('cooked{BROKEN}'))\n"
    )
    task = {"kind": "function", "path": f"{tmp_path}/own.py:rows"}
    reward = {"kind": "function", "path": f"{tmp_path}/own.py:reward"}
    config = {"model": {"path": str(padded)}, "task": task, "reward": reward}
    ids = [len(tokenizer) + 1, *sampled, 2]

    async def scored() -> Any:
        worker = TaskRewardWorker(config, limit_memory=False)
        return [score async for _, score in worker.score([ScoreRequest(0, 0, token_array(ids), Finish.STOP)])]

    assert asyncio.run(scored()) == [Scored(1.0)]


def test_a_stop_string_is_found_around_ids_without_text(engine: Any, tokenizer: Any) -> None:
    stop = StopStrings(text_decoder(tokenizer), ["one\ntwo"])
    one, two = tokenizer.encode("an one"), tokenizer.encode("\ntwo")
    padding = [len(tokenizer)] * 40
    assert stop.hit([*one, *two]) and stop.hit([*one, *padding, *two]) and not stop.hit([*one, *padding])


def test_each_byte_of_a_character_may_be_sampled_and_stays(engine: Any, tokenizer: Any) -> None:
    parts = tuple(one for one in range(len(tokenizer)) if tokenizer.decode([one]) == BROKEN)
    sampling = Sampling(max_tokens=24, allowed_token_ids=parts, stop=("never",))
    [(column, finish)] = completed(engine, works_of(rendered(tokenizer, [user("Hello")]), [sampling], 40))
    assert len(column) == 24 and finish is Finish.LENGTH and set(column.tokens) <= set(parts)
    assert np.isfinite(column.logprobs).all()


# ---------------------------------------------------------------- as other programs compute it


def test_the_engine_writes_what_transformers_would_write(real_model: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "real_text.py"), "--quick", "--json"]
    nowhere = [f"--{name}={real_model}/none" for name in ("vllm", "jax")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*script, f"--model={real_model}", *nowhere],
        capture_output=True, text=True, timeout=TIMEOUT_S, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["greedy_first_gap_transformers"] < 1e-3
    assert result["logprob_gap_transformers_max"] < 1e-3
    assert result["end_in_the_middle_share"] == 0 and result["tokens"] > 0
