"""The defaults of other frameworks, read in their wheels, as tables of reports/peer-defaults.md.

    python scripts/peer_defaults.py             print the tables
    python scripts/peer_defaults.py --write     put them into the page
    ... --wheels DIR                            of wheels that are there already; else pip downloads them

Nothing is installed, imported or run: sources are parsed. It is no part of the check, because it needs a
network. If a wheel no longer has what is read here, the script ends and names it.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "reports" / "peer-defaults.md"
BEGIN, END = "<!-- scripts/peer_defaults.py --write -->\n", "<!-- end of defaults -->"
WHEELS = {"trl": "1.16.0", "verl": "0.9.1", "openrlhf": "0.11.2", "areal": "1.0.4", "ms-swift": "4.6.0",
          "google-tunix": "0.1.7"}  # fmt: skip


@dataclass(frozen=True)
class Default:
    """A name with its default value. `where`: a dataclass, "" for an option of argparse or a key of YAML."""

    file: str
    where: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Formula:
    """What the source computes: `shown` if it has `pattern`."""

    file: str
    pattern: str
    shown: str


Cell = Default | Formula | None
GRPO = "trl/trainer/grpo_config.py"
ASYNC = "trl/experimental/async_grpo/async_grpo_config.py"
WORKER = "trl/experimental/async_grpo/async_rollout_worker.py"
ACTOR = "verl/trainer/config/actor/actor.yaml"
CORRECTION = "verl/trainer/config/algorithm/rollout_correction.yaml"
RAY, AREAL = "openrlhf/cli/train_ppo_ray.py", "areal/api/cli_args.py"
SWIFT, SWIFT_RLHF = "swift/rlhf_trainers/args_mixin.py", "swift/arguments/rlhf_args.py"
TUNIX = "tunix/rl/grpo/grpo_learner.py"

COLUMNS = ("TRL `GRPOConfig`", "TRL `AsyncGRPOConfig`", "verl", "OpenRLHF", "AReaL", "ms-swift", "tunix")
PACKAGES = ("trl", "trl", "verl", "openrlhf", "areal", "ms-swift", "google-tunix")
ROWS: dict[str, tuple[Cell, ...]] = {
    "`batch.group_size` 8": (
        Default(GRPO, "GRPOConfig", "num_generations"), Default(ASYNC, "AsyncGRPOConfig", "num_generations"),
        Default("verl/trainer/config/rollout/rollout.yaml", "", "n"),
        Default(RAY, "", "--rollout.n_samples_per_prompt"),
        Default(AREAL, "GenerationHyperparameters", "n_samples"),
        Default(SWIFT_RLHF, "GRPOArguments", "num_generations"),
        Default(TUNIX, "GRPOConfig", "num_generations"),
    ),
    "`batch.epochs` 1": (
        Default(GRPO, "GRPOConfig", "num_iterations"), None, Default(ACTOR, "", "ppo_epochs"),
        Default(RAY, "", "--train.max_epochs"), None, Default(SWIFT_RLHF, "GRPOArguments", "num_iterations"),
        Default(TUNIX, "GRPOConfig", "num_iterations"),
    ),
    "`optimizer.lr` 1e-06": (
        Default(GRPO, "GRPOConfig", "learning_rate"), Default(ASYNC, "AsyncGRPOConfig", "learning_rate"),
        Default(ACTOR, "", "lr"), Default(RAY, "", "--{prefix}.adam.lr"),
        Default(AREAL, "OptimizerConfig", "lr"), None, None,
    ),
    "`optimizer.weight_decay` 0": (
        None, None, Default(ACTOR, "", "weight_decay"), Default(RAY, "", "--{prefix}.adam.weight_decay"),
        Default(AREAL, "OptimizerConfig", "weight_decay"), None, None,
    ),
    "`algorithm.clip_low` 0.2": (
        Default(GRPO, "GRPOConfig", "epsilon"), Default(ASYNC, "AsyncGRPOConfig", "epsilon"),
        Default(ACTOR, "", "clip_ratio_low"), Default(RAY, "", "--actor.eps_clip"),
        Default(AREAL, "PPOActorConfig", "eps_clip"), Default(SWIFT, "GRPOArgumentsMixin", "epsilon"),
        Default(TUNIX, "GRPOConfig", "epsilon"),
    ),
    "`algorithm.clip_dual` none": (
        Default(GRPO, "GRPOConfig", "delta"), None, Default(ACTOR, "", "clip_ratio_c"), None,
        Default(AREAL, "PPOActorConfig", "c_clip"), Default(SWIFT, "GRPOArgumentsMixin", "delta"), None,
    ),
    "`algorithm.kl` 0, `kl_estimator` k3": (
        Default(GRPO, "GRPOConfig", "beta"), None, Default(ACTOR, "", "use_kl_loss"),
        Default(RAY, "", "--algo.kl.init_coef", "k1, in the reward"),
        Default(AREAL, "PPOActorConfig", "kl_ctl", "k1, in the reward"),
        Formula(SWIFT_RLHF, r"self\.beta = 0\.04", "`beta` 0.04"),
        Default(TUNIX, "GRPOConfig", "beta", "`kl`: k1"),
    ),
    "deviation of a group: biased, + 1e-06": (
        Formula("trl/trainer/grpo_trainer.py", r"\(std_rewards \+ 1e-4\)", "unbiased, + 1e-04"),
        Formula(WORKER, r"scored\.mean\(\)\) / \(scored\.std\(\) \+ 1e-8\)", "biased, + 1e-08"),
        Formula("verl/trainer/ppo/core_algos.py", r"epsilon: float = 1e-6", "unbiased, + 1e-06"),
        Formula("openrlhf/trainer/ppo_utils/experience_maker.py", r"rewards\.std\(-1, keepdim=True\) \+ 1e-9",
                "`group_norm`: unbiased, + 1e-09"),
        Default(AREAL, "NormConfig", "std_unbiased", "if asked for, + 1e-05"),
        Formula("swift/rl_core/advantage.py", r"\(std \+ 1e-4\)", "unbiased, + 1e-04"),
        Formula("tunix/rl/algo_core.py", r"ddof=1(?s:.)*std_grouped_rewards \+ 1e-6", "unbiased, + 1e-06"),
    ),
    "`algorithm.normalize` token": (
        Default(GRPO, "GRPOConfig", "loss_type"), None, Default(ACTOR, "", "loss_agg_mode"),
        Default(RAY, "", "--actor.loss_agg_mode"), None,
        Formula(SWIFT_RLHF, r"self\.loss_type = 'grpo'", "`loss_type` grpo"),
        Default(TUNIX, "GRPOConfig", "loss_agg_mode"),
    ),
    "`algorithm.correction` 2, `correction_of` token, `correction_outside` clip": (
        Default(GRPO, "GRPOConfig", "vllm_importance_sampling_mode", "above 3.0"), None,
        Default(CORRECTION, "", "rollout_is"), Default(RAY, "", "--algo.advantage.is_correction_level"),
        Default(AREAL, "PPOActorConfig", "rejection_sampling"),
        Formula(SWIFT, r"rollout_importance_sampling_mode: [^=]*= None",
                "`rollout_importance_sampling_mode` none"),
        Default("tunix/rl/agentic/agentic_grpo_learner.py", "GRPOConfig", "sampler_is"),
    ),
    "bounds of the correction: 0 to 2, truncated": (
        Default(GRPO, "GRPOConfig", "vllm_importance_sampling_clip_max", "masks sequences"), None,
        Default(CORRECTION, "", "rollout_is_threshold"),
        Default(RAY, "", "--algo.advantage.is_correction_threshold", "masks tokens"),
        Default(AREAL, "RejectionSamplingConfig", "upper", "masks tokens"),
        Default(SWIFT, "GRPOArgumentsMixin", "rollout_importance_sampling_threshold"),
        Default("tunix/rl/agentic/agentic_grpo_learner.py", "GRPOConfig", "sampler_is_threshold"),
    ),
}  # fmt: skip

SAME = {
    "TRL `GRPOConfig`": 'correction = 3.0, correction_of = "sequence", correction_outside = "drop"',
    "TRL `AsyncGRPOConfig`": 'anchor = "behavior", correction = "none"',
    "verl, `grpo`": 'clip_dual = 3.0, correction = "none"',
    "OpenRLHF, `group_norm`": 'kl = 0.01, kl_estimator = "k1", kl_in = "reward", correction = "none"',
    "OpenRLHF, correction by `token`": 'correction_low = 0.5, correction = 5.0, correction_outside = "drop"',
    "AReaL, decoupled loss with `rejection_sampling`": (
        'kl = 0.1, kl_estimator = "k1", kl_in = "reward", correction = 5.0, correction_outside = "drop"'
    ),
    "ms-swift": 'kl = 0.04, normalize = "sequence", correction = "none"',
    "tunix, whose KL in the loss has a mean gradient of 0": 'normalize = "sequence", correction = "none"',
}
"""Keys of `[algorithm]` beside `kind = "grpo"`."""


class Missing(Exception):
    """A wheel no longer has what is read here."""


class Wheel:
    def __init__(self, path: Path) -> None:
        self._archive, self.name = zipfile.ZipFile(path), path.name

    def text(self, file: str) -> str:
        for name in self._archive.namelist():
            if name == file or name.endswith(f"/purelib/{file}"):
                return self._archive.read(name).decode()
        raise Missing(f"{self.name} has no {file}")

    def cell(self, cell: Cell) -> str:
        if cell is None:
            return ""
        if isinstance(cell, Formula):
            if not re.search(cell.pattern, self.text(cell.file)):
                raise Missing(f"{self.name}: {cell.file} has nothing like {cell.pattern}")
            return cell.shown
        value = default_of(self.text(cell.file), cell)
        if value is None:
            raise Missing(f"{self.name}: {cell.file} has no default of {cell.where} {cell.name}")
        note = f" ({cell.note})" if cell.note else ""
        return f"`{cell.name.lstrip('-').replace('{prefix}', 'actor')}` {value}{note}"


def default_of(text: str, cell: Default) -> str | None:
    """The default as text; None: there is none."""
    if cell.file.endswith(".yaml"):
        found = re.search(rf"^\s*{re.escape(cell.name)}:\s*(\S+)", text, re.MULTILINE)
        return shown(ast.Constant(found[1])) if found else None
    nodes = ast.walk(ast.parse(text))
    if cell.where:
        bodies = (node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == cell.where)
        fields = (one for body in bodies for one in body if isinstance(one, ast.AnnAssign))
        values = [one.value for one in fields if ast.unparse(one.target) == cell.name]
    else:
        calls = (one for one in nodes if isinstance(one, ast.Call) and one.args)
        values = [one for one in calls if ast.unparse(one.args[0]).lstrip("f").strip("'\"") == cell.name]
    return shown(values[0]) if values and values[0] is not None else None


def shown(value: ast.expr) -> str | None:
    """A literal, or the `default` of a call of `field` or `add_argument`."""
    if isinstance(value, ast.Call):
        defaults = [word.value for word in value.keywords if word.arg == "default"]
        return shown(defaults[0]) if defaults else None
    if isinstance(value, ast.IfExp):  # of the actor, not of the critic
        value = value.body
    text = ast.unparse(value).strip("'\"")
    try:
        return f"{float(text):g}"
    except ValueError:
        return "none" if text in ("None", "null") else text.lower()


def wheels(directory: Path) -> dict[str, Wheel]:
    found = {}
    for package, version in WHEELS.items():
        pattern = f"{package.replace('-', '_')}-{version}-*.whl"
        if not any(directory.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(directory)]
            subprocess.run([*pip, f"{package}=={version}"], check=True)
        found[package] = Wheel(next(directory.glob(pattern)))
    return found


def tables(opened: dict[str, Wheel]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in WHEELS.items())
    lines = ["", f"Read in the wheels of {versions}.", "An empty cell: there is no default of its own.", ""]
    lines += [f"| Millrace | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for ours, cells in ROWS.items():
        texts = (opened[package].cell(cell) for package, cell in zip(PACKAGES, cells, strict=True))
        lines.append(f"| {ours} | {' | '.join(texts)} |")
    lines += ["", '| the estimator of | `[algorithm]`, beside `kind = "grpo"` |', "|---|---|"]
    lines += [f"| {name} | `{keys}` |" for name, keys in SAME.items()]
    return re.sub(r"\|  +\|", "| |", re.sub(r"\|  +\|", "| |", "\n".join(lines))) + "\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--wheels", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            made = tables(wheels(arguments.wheels or Path(temporary)))
        except Missing as missing:
            sys.exit(f"peer_defaults: {missing}\n  Look there, and mend ROWS")
    if not arguments.write:
        print(made, end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
