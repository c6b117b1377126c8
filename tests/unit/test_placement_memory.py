"""Every estimate of memory, against numbers that were worked out once: whoever changes one says why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millrace.config.schema import Config
from millrace.placement import number_format
from millrace.placement.memory import activation_memory
from millrace.placement.memory.engine_memory import STATE_BYTES, own_engine, vllm
from millrace.placement.memory.needs import COPY_BYTES, MOMENTS_BYTES, Needs, read_needs
from millrace_sim.costs.cluster import Cluster, ClusterCosts
from millrace_sim.costs.generation import Generation
from millrace_sim.costs.hardware import device
from millrace_sim.costs.models import MODELS, from_hf_config
from millrace_sim.costs.training import Training

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS, LAYERS = 64, 160, 300, 8, 4, 3
MODEL = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
    "model_type": "llama",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers, whose output projection is not its embedding."""
    directory = tmp_path_factory.mktemp("model")
    kv = KV_HEADS * HIDDEN // HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {f"model.layers.{i}.{name}.weight": of for i in range(LAYERS) for name, of in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    save_file(
        {name: np.zeros(of, np.float32) for name, of in shapes.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


RUNS: dict[str, dict[str, dict[str, object]]] = {
    "plain": {},
    "float32": {"model": {"dtype": "float32"}},
    "recompute": {"model": {"recompute": True}},
    "reference": {"algorithm": {"kind": "grpo", "kl": 0.1}},
    "apart": {"algorithm": {"kind": "grpo", "kl": 0.1, "reference": "replica"}},
    "lora": {"adapter": {"rank": 4}},
    "dora": {"adapter": {"rank": 4, "kind": "dora"}},
    "8-bit moments": {"optimizer": {"states": "8bit"}},
    "four ranks": {"trainer": {"shard": 2, "tensor": 2}},
    "sequence": {"trainer": {"sequence": 2}},
    "offload": {"trainer": {"offload": True}},
    "standby": {"trainer": {"standby": True}},
    "two devices": {"rollout": {"tensor": 2}},
    "fp8": {"rollout": {"engine": "vllm", "quantization": "fp8"}},
    "min_p": {"sampling": {"min_p": 0.1, "repetition_penalty": 1.1}, "rollout": {"slots": 512}},
}


def needs_of(model: Path, run: str, *, on_gpu: bool) -> Needs:
    tree: dict[str, dict[str, object]] = {
        "task": {"kind": "gym", "name": "chain_sum"},
        "reward": {"kind": "gym"},
        "model": {"path": str(model), "dtype": "bfloat16"},
        "rollout": {"slots": 4, "max_sequence_tokens": 512},
    }
    for section, keys in RUNS[run].items():
        tree[section] = tree.get(section, {}) | keys
    memory = vllm if run == "fp8" else own_engine
    return read_needs(Config.model_validate(tree), on_gpu=on_gpu, replica_memory=memory)


def planned(name: str) -> tuple[float, ...]:
    """Of a model of the simulator's table: weights, KV of a token, activations, memory of a device of the
    trainer, tokens of KV beside the weights of a replica, and seconds to load a checkpoint and to sleep."""
    model, h800 = MODELS[name], device("H800")
    kept, again = (Training(model, h800, 64, 8, recompute=recompute) for recompute in (False, True))
    generation = Generation(model, h800, 16)
    costs = ClusterCosts(Cluster(generation, again, 1), 1)
    return (
        *(model.weights_bytes(), model.weights_bytes("fp8")),
        *(model.kv_token_bytes(), model.kv_token_bytes("fp8")),
        *(kept.activation_bytes(4096), again.activation_bytes(4096)),
        *(kept.memory_bytes(4096), again.memory_bytes(4096)),
        *(generation.kv_capacity_tokens, costs.load_s, costs.sleep_s),
    )


def kept(needs: Needs) -> tuple[int, ...]:
    """Of the trainer on a device and on the host; of a replica there and its cache; of a checkpoint; for a
    moment in the trainer and in a replica."""
    moment = needs.activation_memory
    return (
        *(needs.trainer.device_bytes, needs.trainer.host_bytes),
        *(needs.replica.device_bytes, needs.replica.host_bytes, needs.replica.cache_bytes),
        *(needs.checkpoint_bytes, moment.trainer_bytes, moment.replica_bytes),
    )


KEPT: dict[tuple[str, str], tuple[int, ...]] = {
    ("plain", "GPU"): (2_763_008, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_716_330_240, 7_438_336),
    ("plain", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("float32", "GPU"): (2_685_952, 0, 2_915_840, 76_800, 0, 2_014_464, 1_771_198_464, 8_585_216),
    ("float32", "CPU"): (0, 2_685_952, 0, 3_587_328, 0, 2_014_464, 239_075_328, 8_585_216),
    ("recompute", "GPU"): (2_763_008, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_623_531_264, 7_438_336),
    ("recompute", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 113_246_208, 8_585_216),
    ("reference", "GPU"): (3_434_496, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_716_330_240, 7_438_336),
    ("reference", "CPU"): (0, 5_036_160, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("apart", "GPU"): (2_763_008, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_716_330_240, 7_438_336),
    ("apart", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("lora", "GPU"): (940_288, 53_760, 1_457_920, 38_400, 0, 161_280, 1_716_330_240, 7_438_336),
    ("lora", "CPU"): (0, 1_020_928, 0, 3_961_472, 0, 161_280, 239_075_328, 8_585_216),
    ("dora", "GPU"): (974_848, 60_672, 1_457_920, 38_400, 0, 182_016, 1_716_330_240, 7_438_336),
    ("dora", "CPU"): (0, 1_065_856, 0, 3_961_472, 0, 182_016, 239_075_328, 8_585_216),
    ("8-bit moments", "GPU"): (1_761_022, 77_056, 1_457_920, 38_400, 0, 1_012_478, 1_716_330_240, 7_438_336),
    ("8-bit moments", "CPU"): (0, 3_362_686, 0, 3_961_472, 0, 1_012_478, 239_075_328, 8_585_216),
    ("four ranks", "GPU"): (690_752, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_688_546_304, 7_438_336),
    ("four ranks", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 206_160_384, 8_585_216),
    ("sequence", "GPU"): (1_381_504, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_663_457_280, 7_438_336),
    ("sequence", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 181_109_760, 8_585_216),
    ("offload", "GPU"): (0, 3_175_808, 1_457_920, 38_400, 0, 2_014_464, 1_716_148_224, 7_438_336),
    ("offload", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("standby", "GPU"): (502_763_008, 77_056, 1_457_920, 38_400, 0, 2_014_464, 1_716_330_240, 7_438_336),
    ("standby", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("two devices", "GPU"): (2_763_008, 77_056, 728_960, 38_400, 0, 2_014_464, 1_716_330_240, 7_438_336),
    ("two devices", "CPU"): (0, 4_364_672, 0, 3_961_472, 0, 2_014_464, 239_075_328, 8_585_216),
    ("fp8", "GPU"): (2_763_008, 77_056, 448_640, 0, 589_824, 2_014_464, 1_716_330_240, 7_438_336),
    ("fp8", "CPU"): (0, 4_364_672, 0, 1_235_072, 0, 2_014_464, 239_075_328, 8_585_216),
    ("min_p", "GPU"): (2_763_008, 77_056, 101_334_784, 38_400, 0, 2_014_464, 1_716_330_240, 8_294_400),
    ("min_p", "CPU"): (0, 4_364_672, 0, 203_715_200, 0, 2_014_464, 239_075_328, 8_585_216),
}
SIZES: dict[str, tuple[float, ...]] = {
    "Qwen2.5-1.5B": (3_087_138_816, 1_543_569_408, 28_672, 14_336),
    "Qwen2.5-7B": (15_230_566_400, 7_615_283_200, 57_344, 28_672),
    "Qwen2.5-14B": (29_538_385_920, 14_769_192_960, 196_608, 98_304),
    "Qwen2.5-32B": (65_525_514_240, 32_762_757_120, 262_144, 131_072),
    "Qwen2.5-72B": (145_408_131_072, 72_704_065_536, 327_680, 163_840),
    "Qwen3-8B": (16_380_854_272, 8_190_427_136, 147_456, 73_728),
    "Llama-3.1-8B": (16_059_990_016, 8_029_995_008, 131_072, 65_536),
    "Llama-3.1-70B": (141_104_775_168, 70_552_387_584, 327_680, 163_840),
    "Llama-3.1-405B": (811_698_487_296, 405_849_243_648, 516_096, 258_048),
    "Qwen3-30B-A3B": (61_063_823_360, 30_531_911_680, 98_304, 49_152),
}
"""Weights in bf16 and fp8, KV of a token in bf16 and fp8."""
TRAINER: dict[str, tuple[float, ...]] = {
    "Qwen2.5-1.5B": (5_989_466_112, 566_231_040, 1_134_575_616.0, 456_671_232.0),
    "Qwen2.5-7B": (13_975_420_928, 1_321_205_760, 3_650_748_416.0, 2_068_971_520.0),
    "Qwen2.5-14B": (34_225_520_640, 2_726_297_600, 7_970_488_320.0, 4_033_085_440.0),
    "Qwen2.5-32B": (45_634_027_520, 3_397_386_240, 13_894_942_720.0, 8_615_362_560.0),
    "Qwen2.5-72B": (91_268_055_040, 6_509_559_808, 29_584_523_264.0, 18_989_711_360.0),
    "Qwen3-8B": (20_535_312_384, 1_778_384_896, 4_614_520_832.0, 2_269_904_896.0),
    "Llama-3.1-8B": (18_253_611_008, 1_644_167_168, 4_289_200_128.0, 2_213_019_648.0),
    "Llama-3.1-70B": (91_268_055_040, 6_509_559_808, 29_046_603_776.0, 18_451_791_872.0),
    "Llama-3.1-405B": (287_494_373_376, 19_193_135_104, 137_399_107_584.0, 103_861_452_800.0),
    "Qwen3-30B-A3B": (13_690_208_256, 1_090_519_040, 9_344_253_952.0, 7_769_292_800.0),
}
"""Activations, and memory of a device, without recomputation and with it."""
SERVED: dict[str, tuple[float, ...]] = {
    "Qwen2.5-1.5B": (40_070_900, 1.350623232, 0.005275872),
    "Qwen2.5-7B": (19_823_685, 6.6633728, 0.0260288),
    "Qwen2.5-14B": (5_709_135, 12.92304384, 0.05048064),
    "Qwen2.5-32B": (4_144_571, 28.66741248, 0.11198208),
    "Qwen2.5-72B": (3_071_874, 63.616057344, 0.248500224),
    "Qwen3-8B": (7_701_410, 7.166623744, 0.027994624),
    "Llama-3.1-8B": (8_666_534, 7.026245632, 0.027446272),
    "Llama-3.1-70B": (3_085_007, 61.733339136, 0.241145856),
    "Llama-3.1-405B": (659_376, 355.118088192, 1.387180032),
    "Qwen3-30B-A3B": (11_097_576, 26.71542272, 0.10435712),
}
"""Tokens of KV beside the weights of a replica. Seconds to load a checkpoint, and to sleep."""


@pytest.mark.parametrize(("run", "place"), KEPT)
def test_the_memory_of_a_run_is_as_worked_out(
    model: Path, run: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: False)
    assert kept(needs_of(model, run, on_gpu=place == "GPU")) == KEPT[run, place]


@pytest.mark.parametrize(("run", "activations"), [("plain", 195_035_136), ("lora", 210_763_776)])
def test_layers_of_a_large_model_keep_less_on_a_cpu(
    model: Path, run: str, activations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the model were large: 8 H and 8 I fewer bytes a token and layer, or 4 I with an adapter."""
    monkeypatch.setattr(number_format, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(activation_memory, "SPARING_MIN", 0)
    assert kept(needs_of(model, run, on_gpu=False))[6] == activations


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_planned_model_is_as_worked_out(name: str) -> None:
    assert planned(name) == (*SIZES[name], *TRAINER[name], *SERVED[name])


def test_the_simulator_counts_keys_values_and_states_as_a_run_does(model: Path) -> None:
    needs = needs_of(model, "plain", on_gpu=True)
    assert from_hf_config(MODEL).kv_token_bytes() == needs.kv_token_bytes
    assert 2 * COPY_BYTES + MOMENTS_BYTES["float32"] == STATE_BYTES
