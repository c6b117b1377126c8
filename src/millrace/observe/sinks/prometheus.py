"""Which numbers of a run a monitoring system gets, and Prometheus, served by its own library (an extra)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from millrace.core.errors import ConfigError
from millrace.core.events import Event
from millrace.observe.environment_use import EnvironmentUse
from millrace.observe.sinks.trackers import refuse_uninstalled

Labels = tuple[str, ...]
Record = Callable[..., None]

GAUGES: dict[str, tuple[str, Labels]] = {
    "millrace_steps_wanted": ("versions that the whole run makes", ()),
    "millrace_version": ("batches trained on", ()),
    "millrace_reward_mean": ("mean reward of the last step's batch", ()),
    "millrace_loss": ("of the last step", ()),
    "millrace_entropy_nats": ("of the policy in the last step", ()),
    "millrace_groups_without_signal_ratio": ("groups of the last batch whose rewards are all equal", ()),
    "millrace_staleness_mean": ("of the last batch's tokens, in versions", ()),
    "millrace_staleness_max": ("of the last batch's tokens, in versions", ()),
    "millrace_fairness": ("of the last 32 batches; 1 is fair", ()),
    "millrace_groups_ready": ("complete groups that wait for a later step", ()),
    "millrace_trajectories": ("so far, by state", ("state",)),
    "millrace_scores_waiting": ("complete trajectories without a reward, and turns without an answer", ()),
    "millrace_replica_running": ("trajectories in decode slots", ("replica",)),
    "millrace_replica_waiting": ("trajectories without a slot", ("replica",)),
    "millrace_replica_kv_used_ratio": ("of the replica's KV capacity", ("replica",)),
    "millrace_replica_version": ("of the weights that the replica serves", ("replica",)),
    "millrace_resident_bytes": ("memory of a process; shared pages count for each", ("process",)),
    "millrace_available_bytes": ("memory that the host has available", ()),
    "millrace_quiet_seconds": ("since the last progress, if that is long ago; 0: the run goes on", ()),
}
COUNTERS: dict[str, tuple[str, Labels]] = {
    "millrace_trained_tokens_total": ("tokens that carried a loss", ()),
    "millrace_trainer_busy_seconds_total": ("the trainer computed", ()),
    "millrace_trainer_waiting_seconds_total": ("the trainer waited for a batch", ()),
    "millrace_generated_tokens_total": ("by replicas", ("replica",)),
    "millrace_drafted_tokens_total": ("guessed by replicas, and verified", ("replica",)),
    "millrace_accepted_tokens_total": ("drafted tokens that were right", ("replica",)),
    "millrace_replica_busy_seconds_total": ("the replica computed", ("replica",)),
    "millrace_replica_idle_seconds_total": ("the replica had nothing to do", ("replica",)),
    "millrace_scores_total": ("rewards by outcome: scored, failed, abstain", ("outcome",)),
    "millrace_answers_total": ("of environments, between two turns", ()),
    "millrace_answer_seconds_total": ("turns waited for these answers", ()),
    "millrace_observed_tokens_total": ("that environments wrote", ()),
    "millrace_worker_deaths_total": ("each is followed by a restart, or by the end", ("role",)),
    "millrace_findings_total": ("of the doctor, by fault", ("fault",)),
    "millrace_warnings_total": ("failures that did not end the run", ("source",)),
}
"""Counters of this process: they begin at 0 when a run is resumed."""

_OF_STEP = {
    "version": "millrace_version",
    "reward_mean": "millrace_reward_mean",
    "staleness_mean": "millrace_staleness_mean",
    "staleness_max": "millrace_staleness_max",
    "groups_ready": "millrace_groups_ready",
}
_OF_TRAINER = {
    "loss": "millrace_loss",
    "entropy": "millrace_entropy_nats",
    "groups_without_signal": "millrace_groups_without_signal_ratio",
}
_OF_REPORT = {
    "running": "millrace_replica_running",
    "waiting": "millrace_replica_waiting",
    "version": "millrace_replica_version",
}
_GROWING = {
    "generated_tokens": "millrace_generated_tokens_total",
    "drafted_tokens": "millrace_drafted_tokens_total",
    "accepted_tokens": "millrace_accepted_tokens_total",
    "busy_s": "millrace_replica_busy_seconds_total",
    "idle_s": "millrace_replica_idle_seconds_total",
}


class Exported:
    """A sink. Calls `set_(name, value, *labels)` for gauges, `add(name, amount, *labels)` for counters."""

    def __init__(self, set_: Record, add: Record) -> None:
        self._set, self._add = set_, add
        self._newest: dict[tuple[str, str], float] = {}  # a replica's own counters, which restart with it
        self._environment = EnvironmentUse()

    def __call__(self, event: Event) -> None:
        answered_s = self._environment.answer_s
        self._environment(event)
        if event.kind == "observed":
            self._add("millrace_answer_seconds_total", self._environment.answer_s - answered_s)
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event.fields)

    def _on_run_started(self, fields: dict[str, Any]) -> None:
        self._set("millrace_steps_wanted", fields["steps"])
        self._set("millrace_version", fields["resumed_version"])

    def _on_step(self, fields: dict[str, Any]) -> None:
        figures = [(_OF_STEP[key], fields[key]) for key in _OF_STEP if key in fields]
        figures += [
            (_OF_TRAINER[key], fields["metrics"][key]) for key in _OF_TRAINER if key in fields["metrics"]
        ]
        figures.append(("millrace_fairness", (fields.get("window") or {}).get("fairness")))
        for name, value in figures:
            if value is not None:
                self._set(name, value)
        for state, num in fields["accounting"].items():
            self._set("millrace_trajectories", num, state)
        self._set("millrace_quiet_seconds", 0)
        self._add("millrace_trained_tokens_total", fields["trained_tokens"])
        self._add("millrace_trainer_busy_seconds_total", fields["step_s"])
        self._add("millrace_trainer_waiting_seconds_total", fields["wait_s"])

    def _on_report(self, fields: dict[str, Any]) -> None:
        replica = fields["replica"]
        for key, name in _OF_REPORT.items():
            self._set(name, fields[key], replica)
        used = fields["kv_used_tokens"] / max(fields["kv_capacity_tokens"], 1)
        self._set("millrace_replica_kv_used_ratio", used, replica)
        for key, name in _GROWING.items():
            before, now = self._newest.get((replica, key), 0), fields.get(key, 0)
            self._newest[replica, key] = now
            self._add(name, now - before if now >= before else now, replica)

    def _on_finished(self, _: dict[str, Any]) -> None:
        self._set("millrace_scores_waiting", self._environment.num_waiting)

    def _on_observed(self, fields: dict[str, Any]) -> None:
        self._on_finished(fields)
        self._add("millrace_answers_total", 1)
        self._add("millrace_observed_tokens_total", fields["tokens"])

    def _on_scored(self, fields: dict[str, Any]) -> None:
        self._on_ended(fields)
        self._add("millrace_scores_total", 1, fields["outcome"])

    def _on_ended(self, fields: dict[str, Any]) -> None:
        """The trajectory waits no more: if its group ended, the trajectory ends without a reward."""
        self._on_finished(fields)

    def _on_memory(self, fields: dict[str, Any]) -> None:
        for process, resident_bytes in fields["resident_bytes"].items():
            self._set("millrace_resident_bytes", resident_bytes, process)
        if fields["available_bytes"] is not None:
            self._set("millrace_available_bytes", fields["available_bytes"])

    def _on_stalled(self, fields: dict[str, Any]) -> None:
        self._set("millrace_quiet_seconds", fields["quiet_s"])

    def _on_worker_died(self, fields: dict[str, Any]) -> None:
        self._add("millrace_worker_deaths_total", 1, fields["role"])

    def _on_finding(self, fields: dict[str, Any]) -> None:
        self._add("millrace_findings_total", 1, fields["fault"])

    def _on_warned(self, fields: dict[str, Any]) -> None:
        self._add("millrace_warnings_total", 1, fields["source"])


CLOSE_S = 5.0


class PrometheusSink:
    """Serves `http://ADDRESS/metrics` from a thread of its own until `close`. The metrics are those of
    `observe.sinks.prometheus`.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be used.
    """

    def __init__(self, address: str) -> None:
        refuse_uninstalled("prometheus", address)
        import prometheus_client as client

        registry = client.CollectorRegistry()
        self._gauges = {
            name: client.Gauge(name, about, labels, registry=registry)
            for name, (about, labels) in GAUGES.items()
        }
        self._counters = {
            name: client.Counter(name, about, labels, registry=registry)
            for name, (about, labels) in COUNTERS.items()
        }
        self._exported = Exported(self._set, self._add)
        host, port = split(address)
        with _taking(address):
            self._server, self._thread = client.start_http_server(port, host, registry)

    def __call__(self, event: Event) -> None:
        self._exported(event)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLOSE_S)

    def _set(self, name: str, value: float, *labels: str) -> None:
        _of(self._gauges[name], labels).set(value)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        _of(self._counters[name], labels).inc(amount)


def refuse_unusable(address: str) -> None:
    """Before a run starts. Raises ConfigError: the library is missing, or another process has the port."""
    refuse_uninstalled("prometheus", address)
    host, port = split(address)
    with _taking(address):
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = addresses[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(where)


def split(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextmanager
def _taking(address: str) -> Iterator[None]:
    """An OSError in the block becomes a ConfigError about `address`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"`observe.prometheus` ({address}) cannot be listened on: {error.strerror or error}\n"
            "  Another run may have the port: name a free one, or leave the key out."
        ) from error


def _of(metric: Any, labels: tuple[str, ...]) -> Any:
    return metric.labels(*labels) if labels else metric
