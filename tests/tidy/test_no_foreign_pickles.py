"""Unpickling runs code: only what the run's own processes send each other is unpickled, and no file ever."""

from __future__ import annotations

import ast

from tests.tidy.sources import calls, imports, modules

SPEAKS_THE_WIRE = {
    "millrace.runtime.wire",
    "millrace.runtime.handle",
    "millrace.runtime.worker",
    "millrace.runtime.seam",
    "millrace.sim.virtual.links",
}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_CODE = ("torch.load", "numpy.load", "np.load", "pandas.read_pickle", "yaml.load", "torch.hub.load")


def test_only_the_wire_between_a_runs_processes_imports_pickle() -> None:
    offenders = [
        f"{module.at(node)}: {name}"
        for module in modules()
        if module.name not in SPEAKS_THE_WIRE
        for node, name in imports(module)
        if name.split(".")[0] in PICKLES
    ]
    assert not offenders, "\n".join(offenders)


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
