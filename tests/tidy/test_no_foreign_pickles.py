"""Unpickling runs code: only what the run's own processes send each other is unpickled, and no file but the
functions that a run carries in its own directory (`config.carried` says when it trusts one)."""

from __future__ import annotations

import ast

from tests.tidy.sources import calls, imports, modules

SPEAKS_THE_WIRE = {
    "millrace.core.completion.columns",
    "millrace.engines.vllm.extension",
    "millrace.rewards.reward_process",
    "millrace_jax.devices.processes",
    "millrace.runtime.local.framing",
    "millrace_ray.actor",
    "millrace.runtime.seam",
    "millrace_sim.virtual.links",
}
CARRIES_FUNCTIONS = {"millrace.config.carried", "millrace.api.configure"}
"""The first reads and writes a run's own file; the second only writes."""
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_CODE = ("torch.load", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "torch.hub.load")


def test_only_the_wire_of_a_run_and_what_it_carries_import_pickle() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        if module.name not in SPEAKS_THE_WIRE | CARRIES_FUNCTIONS
        for node, name in imports(module)
        if name.split(".")[0] in PICKLES
    ]
    assert not offenders, "\n".join(offenders)


def test_carried_functions_are_read_in_one_place_after_the_digest_was_checked() -> None:
    reading = {
        module.name: [module.at(call) for call, name in calls(module) if name.endswith((".loads", ".load"))]
        for module in modules()
        if module.name in CARRIES_FUNCTIONS
    }
    assert len(reading["millrace.config.carried"]) == 2  # a pickle in a pickle, of trusted bytes
    assert not reading["millrace.api.configure"]


def test_nothing_that_may_run_code_loads_a_file() -> None:
    offenders = [
        f"{module.at(call)}: {name}"
        for module in modules()
        for call, name in calls(module)
        if name in (*RUNS_CODE, "pickle.load") and not _weights_only(call)
    ]
    assert not offenders, "\n".join(offenders)


def test_no_model_brings_its_own_code() -> None:
    trusted = [
        module.at(keyword.value)
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
    ]
    assert not trusted, "\n".join(trusted)


def _weights_only(call: ast.Call) -> bool:
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    wanted = values.get("weights_only")
    return isinstance(wanted, ast.Constant) and wanted.value is True
