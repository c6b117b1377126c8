"""vLLM's drafts by key: what is asked of vLLM, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_preflight import MODEL, make_directory

from millrace.checks.preflight import preflight
from millrace.config.schema import Config
from millrace.core.errors import ConfigError
from millrace.engines.vllm import vllm_versions
from millrace.engines.vllm.extension import CutOff, repeated
from millrace.engines.vllm.vllm_arguments import draft_arguments
from millrace.rollout.engine_kinds import refuse_unable
from millrace.rollout.protocol import EngineOptions


def config_of(rollout: dict[str, Any], **sections: Any) -> Config:
    task, reward = {"kind": "gym", "name": "chain_sum"}, {"kind": "gym"}
    rollout = {"engine": "vllm", "drafts": "ngram", "seeded": False} | rollout
    return Config.model_validate(
        {"model": {"path": "m"}, "task": task, "reward": reward, "rollout": rollout, **sections}
    )


def options_of(path: Path, **options: Any) -> EngineOptions:
    usual = {
        "slots": 16,
        "max_sequence_tokens": 256,
        "draft_tokens": 3,
        "draft_rows_max": 4,
        "keep_kv": False,
        "probe": False,
    }
    return EngineOptions(model_path=str(path), **(usual | options))


def model_in(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("rollout", "sections", "reason"),
    [
        ({"seeded": True}, {}, "`rollout.seeded`: what is drafted decides"),
        ({}, {"sampling": {"min_p": 0.1}}, "`sampling.min_p`: vLLM refuses"),
        ({"tensor": 2}, {}, "`rollout.tensor`: nobody has tried both"),
        ({"drafts": "eagle"}, {}, "no `rollout.draft_model`: set it to"),
        ({"drafts": "suffix", "slots": 9}, {}, r"`rollout.draft_rows_max` \(8\): vLLM makes suffix drafts"),
    ],
)
def test_what_does_not_go_with_drafts_is_refused_by_name(
    rollout: dict[str, Any], sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)`rollout.drafts` .* in vLLM does not go with\n.*{reason}"):
        refuse_unable(config_of(rollout, **sections))
    refuse_unable(config_of({}))


def test_vllm_drafts_for_few_rows_only(tmp_path: Path) -> None:
    asked = draft_arguments(options_of(tmp_path, drafts="ngram"))["speculative_config"]
    assert asked["method"] == "ngram" and asked["num_speculative_tokens"] == 3
    assert asked["num_speculative_tokens_per_batch_size"] == [(1, 4, 3), (5, 17, 0)]
    always = draft_arguments(options_of(tmp_path, drafts="ngram", draft_rows_max=16))["speculative_config"]
    assert "num_speculative_tokens_per_batch_size" not in always
    assert draft_arguments(options_of(tmp_path)) == {}


def test_the_weights_of_drafts_come_from_their_own_directory(tmp_path: Path) -> None:
    for architecture, method in (("EagleLlamaForCausalLM", "eagle"), ("LlamaForCausalLMEagle3", "eagle3")):
        head = str(model_in(tmp_path / method, architectures=[architecture]))
        asked = draft_arguments(options_of(tmp_path, drafts="eagle", draft_model=head))["speculative_config"]
        assert (asked["method"], asked["model"]) == (method, head)
        assert asked["draft_load_config"] == {"load_format": "auto"}


def test_preflight_misses_what_drafts_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, packages = make_directory(tmp_path / "model"), tmp_path / "packages"
    (packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (packages / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))

    def look(drafts: str, head: Path | None = None) -> None:
        rollout = {"drafts": drafts, "draft_rows_max": 32, "draft_model": head and str(head)}
        preflight(config_of(rollout, model={"path": str(model)}), tmp_path)

    with pytest.raises(ConfigError, match=r"needs the package arctic-inference.*pip install arctic"):
        look("suffix")
    with pytest.raises(ConfigError, match=r"(?s)`rollout.draft_model` .* is no directory .*Name the"):
        look("eagle", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r'(?s)needs layers for multi-token prediction.*Take "ngram"'):
        look("mtp")
    (packages / "arctic_inference").mkdir()
    (model / "config.json").write_text(json.dumps(MODEL | {"num_nextn_predict_layers": 1}))
    look("suffix")
    look("eagle", model)
    look("mtp")


def test_missing_parts_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_versions, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install arctic-inference"):
        vllm_versions.refuse_missing_package("suffix")
    vllm_versions.refuse_missing_package("ngram")
    model_in(tmp_path, model_type="qwen3")
    for drafts, reason in (
        ("eagle", r"`rollout.draft_model` \(nowhere\) is no directory"),
        ("mtp", "has none of num_nextn_predict_layers"),
    ):
        with pytest.raises(ConfigError, match=reason):
            draft_arguments(options_of(tmp_path, drafts=drafts, draft_model="nowhere"))
    model_in(tmp_path, num_nextn_predict_layers=1)
    assert draft_arguments(options_of(tmp_path, drafts="mtp"))["speculative_config"]["method"] == "mtp"


def test_the_value_of_a_row_is_repeated_for_each_of_its_draft_tokens() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.0, 0.5, 0.7])
    assert torch.equal(repeated(temperatures, ends, 5, 0, 1), torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))
    kept = repeated(torch.tensor([3, 0, 0], dtype=torch.int32), ends, 5)
    assert kept.tolist() == [3, 3, 0, 0, 0] and kept.dtype == torch.int32


def test_no_logits_are_not_cut_off() -> None:
    cut_off, k = CutOff(lambda logits, k, p: logits.topk(int(k.max())).values), torch.tensor([2])
    assert cut_off(torch.ones(0, 4), k[:0], None).shape == (0, 4)
    assert cut_off(torch.ones(1, 4), k, None).shape == (1, 2)
