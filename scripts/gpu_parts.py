"""The parts of `gpu-check`: their commands, how their output is read, and the figures that must hold."""

from __future__ import annotations

import argparse
import importlib.util
import json
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NODE = "node-"
Entry = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """`read` makes an entry of what the command printed and of the directory that was its own."""

    name: str
    command: list[str]
    deadline_s: float
    read: Callable[[str, Path], Entry]
    gpus: int = 1  # that it needs
    lacking: str = ""  # what this machine lacks for it


class Gate(NamedTuple):
    """A figure of a part, and what must hold for it. `sign` "": it is only told."""

    part: str
    figure: str
    sign: str
    limit: float
    what: str

    @property
    def key(self) -> str:
        return f"{self.part.removeprefix(NODE)}.{self.figure}"

    @property
    def must_be(self) -> str:
        return f"{self.sign} {self.limit:g}" if self.sign else ""


GATES = (
    Gate("decode", "over_beside_32", ">=", 2.0, "tokens/s with 32 sequences over those of the other build"),
    Gate("decode", "over_beside_256", ">=", 1.6, "tokens/s with 256 sequences over those of the other build"),
    Gate("training", "over_beside_4096", ">=", 2.0, "training on rows of 4,096 over that of the other build"),
    Gate(
        "training", "over_beside_16384", ">=", 1.5, "training on rows of 16,384 over that of the other build"
    ),
    Gate("weights", "stall_over_copy", "<=", 1.05, "what a publication stops the trainer for, over a copy"),
    Gate("node-gap", "gap_mean", "<", 0.02, "log-probs of trainer and engine differ by, in the mean, nats"),
    Gate("node-gap", "gap_p999", "", 0.0, "and at the 99.9th percentile"),
    Gate("node-fsdp", "gradient_error", "<", 0.01, "gradient of four ranks against one process, relative"),
    Gate("node-mfu", "mfu_7b", ">=", 0.35, "share of the GPUs' arithmetic in a step at 7B (MFU)"),
    Gate("node-vllm", "own_over_vllm", ">=", 0.7, "tokens/s of the own engine over a tuned vLLM"),
    Gate("node-loop", "served_s_max", "<", 10.0, "seconds from a step to its version being served"),
    Gate("node-loop", "checkpoint_stall_s", "<", 5.0, "seconds that a checkpoint stops the trainer"),
)
SIGNS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}


def gates(name: str, entry: Entry, rehearse: bool) -> Entry:
    """The gated figures of a part by key, each with its verdict: in a rehearsal None."""
    found = {}
    for gate in (gate for gate in GATES if gate.part == name):
        value = entry.get(name.removeprefix(NODE), {}).get(gate.figure)
        if value is None:
            continue
        verdict = None
        if gate.sign and not rehearse:
            verdict = "pass" if SIGNS[gate.sign](value, gate.limit) else "fail"
        found[gate.key] = {"value": value, "limit": gate.must_be, "verdict": verdict, "what": gate.what}
    return found


def gate_line(gate: Entry) -> str:
    """A gate of `gates` in words."""
    limit = f"(must be {gate['limit']})" if gate["limit"] else ""
    return f"{gate['what']}: {gate['value']:.4g} {limit} {gate['verdict'] or ''}".rstrip()


def not_run(entry: Entry) -> str:
    """Why a part was not run; empty: it was. Of tests the entry has a number under this key."""
    why = entry.get("skipped")
    return why if isinstance(why, str) else ""


# ------------------------------------------------------------ in order of worth


def parts(options: argparse.Namespace, scratch: Path) -> list[Part]:
    """The most telling first, so that a short lease has the main figures. Without a node's parts for several
    GPUs each has 4 minutes at most."""
    of_node = {part.name: part for part in node_parts(options, scratch)}
    first = [of_node.pop(f"{NODE}{name}") for name in ("vllm", "gap", "offload")]
    vllm, gap, offload = first
    main = main_parts(options)
    return [*main[:-1], vllm, main[-1], gap, *rest_parts(options.rehearse), offload, *of_node.values()]


def main_parts(options: argparse.Namespace) -> list[Part]:
    """What a short lease must answer."""
    rehearse: bool = options.rehearse
    small = ["--rehearse"] if rehearse else []
    builds = [str(ROOT / "benchmarks/builds.py"), "--json", *small]
    builds += ["--beside", str(options.beside.resolve())] if options.beside else []
    tolerated = ("learned", "recovered")  # a few steps teach nothing, and may end before a replica is back
    claims = partial(checks, tolerated=tolerated) if rehearse else checks
    kernels = [*pytest(), str(ROOT / "tests/gpu/test_gpu_kernels.py"), "-m", "gpu"]
    few = ["--set", "steps=4"] if rehearse else []
    python = jax_python()
    in_jax = ["--set", "trainer.backend=jax", "--set", f"trainer.python={python}"]
    in_jax += ["--set", f"steps={4 if rehearse else 60}"]
    return [
        Part("machine", ["-c", MACHINE], 60, last_json),
        Part("kernels", kernels, 150, junit),
        Part("decode", [*builds, "--parts", "decode"], 180, last_json),
        Part("training", [*builds, "--parts", "training"], 235, last_json),
        Part("quickstart", [*quickstart(rehearse), *few], 235, claims),
        Part("weights", [*benchmark(rehearse), "weights"], 60, last_json),
        Part(
            "jax",
            [*quickstart(rehearse), *in_jax],
            235,
            partial(jax_checks, tolerated=tolerated),
            lacking="" if python else "JAX is not installed, neither here nor in .venv-jax",
        ),
    ]


def rest_parts(rehearse: bool) -> list[Part]:
    device = "cpu" if rehearse else "cuda"
    files = {
        name: str(ROOT / "tests/engines" / f"test_{name}.py") for name in ("versions", "work", "settings")
    }
    engines = [*pytest(), files["versions"], files["work"], "--device", device]
    some = ["-k", "logprobs_equal_the_trainers and qwen3"] if rehearse else []
    kernels = f"--ignore={ROOT / 'tests/gpu/test_gpu_kernels.py'}"
    return [
        Part("tests", [*pytest(), str(ROOT / "tests/gpu"), kernels, "-m", "gpu"], 235, junit),
        Part("engine-0.6B", [*benchmark(rehearse), "engine-0.6B"], 150, last_json),
        Part("engines-float32", [*engines, files["settings"], *some], 120, junit),
        Part("engines-bfloat16", [*engines, *some, "--dtype", "bfloat16"], 60, junit),
        Part("engine-1.7B", [*benchmark(rehearse), "engine-1.7B"], 75, last_json),
        Part("trainer-1.7B", [*benchmark(rehearse), "trainer-1.7B"], 90, last_json),
        Part("trl", [*benchmark(rehearse), "trl"], 90, last_json),
    ]


def pytest() -> list[str]:
    return ["-m", "pytest", "-W", "default", "-p", "no:cacheprovider", "--junitxml=junit.xml"]


def benchmark(rehearse: bool) -> list[str]:
    """Without the name of its part."""
    return [str(ROOT / "benchmarks/gpu.py"), "--json", *(["--rehearse"] if rehearse else []), "--parts"]


def quickstart(rehearse: bool) -> list[str]:
    device = "cpu" if rehearse else "cuda"
    return ["-m", "millrace", "quickstart", "--run-dir", "quickstart", "--set", f"model.device={device}"]


def jax_python() -> str:
    """An interpreter that has JAX; empty: there is none."""
    if importlib.util.find_spec("jax") is not None:
        return sys.executable
    python = ROOT / ".venv-jax" / "bin" / "python"
    return str(python) if python.exists() else ""


def node_parts(options: argparse.Namespace, scratch: Path) -> list[Part]:
    """Parts of the large model. Those that need several GPUs are skipped where there are fewer."""
    shared = ["--json", "--gpus", str(max(options.gpus, 1)), "--kept", str(scratch / "models")]
    shared += ["--rehearse"] if options.rehearse else []
    shared += ["--model", str(options.model.resolve())] if options.model else []

    def part(name: str, deadline_s: float, gpus: int = 1) -> Part:
        command = [str(ROOT / "benchmarks/node.py"), *shared, "--parts", name]
        return Part(f"{NODE}{name}", command, deadline_s, last_json, gpus)

    return [
        part("gap", 235),
        part("offload", 235),
        part("vllm", 235),
        part("fsdp", 240, 4),
        part("mfu", 300, 4),
        part("loop", 600, 4),
        part("faults", 600, 4),
    ]


MACHINE = """
import json, platform, torch, transformers
gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
    "cuda": torch.version.cuda, "gpu": gpu and gpu.name, "gpu_bytes": gpu and gpu.total_memory,
    "gpus": torch.cuda.device_count(), "processor": platform.machine(),
}))
"""


# ------------------------------------------------------------ what parts say


def last_json(printed: str, directory: Path) -> Entry:
    """The last line that is an object. A benchmark prints one after each figure, in case of a deadline."""
    objects = [line for line in printed.splitlines() if line.startswith("{")]
    found: Entry = json.loads(objects[-1])
    return found


def junit(printed: str, directory: Path) -> Entry:
    """How many tests passed, failed and were skipped; of each failure the name and the first line."""
    suite = ElementTree.parse(directory / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    failed = {
        f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "").splitlines()[:1]
        for case in suite.iter("testcase")
        for found in (*case.findall("failure"), *case.findall("error"))
    }
    reasons = sorted({found.get("message") or "" for found in suite.iter("skipped")})
    count, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    entry = {"tests": count, "skipped": skipped, "skipped_because": reasons, "failed": failed}
    if failed or not count:
        return {**entry, "passed": False, "error": f"{len(failed)} of {count} tests failed"}
    return entry


def checks(printed: str, directory: Path, tolerated: Sequence[str] = ()) -> Entry:
    """The quickstart's claims, and whether each holds. Those of `tolerated` need not."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed)
    lines = re.findall(r"^(PASS|FAIL)  ([^:]+): (.*)$", plain, re.M)
    found = {claim: (word, detail) for word, claim, detail in lines}
    failed = [claim for claim, (word, _) in found.items() if word == "FAIL" and claim not in tolerated]
    took = re.findall(r"^(\d+) s\. Look around", plain, re.M)
    entry: Entry = {"checks": {claim: f"{word}: {detail}" for claim, (word, detail) in found.items()}}
    entry["quickstart_s"] = float(took[0]) if took else None
    if failed or not found:
        error = f"these do not hold: {failed}" if found else "it said no check"
        return {**entry, "passed": False, "error": error}
    return {**entry, "passed": True}


def jax_checks(printed: str, directory: Path, tolerated: Sequence[str] = ()) -> Entry:
    """The claims, and when the trainer had started and made its first step, and for how long it compiled."""
    entry, events = checks(printed, directory, tolerated), directory / "quickstart" / "run" / "events.jsonl"
    seen = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    started = [e["time_s"] for e in seen if e["kind"] == "worker_started" and e["name"] == "trainer"]
    steps = [e for e in seen if e["kind"] == "step"]
    compiled = [e["metrics"].get("compile_s", 0.0) for e in steps if "metrics" in e]
    found = {"steps": len(steps), "compile_s": sum(compiled)}
    if steps and started:
        found["until_first_step_s"] = steps[0]["time_s"] - started[0]
    return {**entry, **found}
