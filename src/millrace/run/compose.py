"""The composition root: the only place that names concrete classes and puts a run together."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any
from uuid import uuid4

from msgspec.structs import replace
from rich.console import Console

from millrace.config.freeze import config_digest, recorded
from millrace.config.schema import Config
from millrace.config.tables.operation import LocalHosts
from millrace.config.tables.task import members_of
from millrace.controller.controller import Controller, ended_by
from millrace.controller.episode import answered
from millrace.controller.fleet.fleet import Fleet, standby_of
from millrace.controller.pace import Pace
from millrace.controller.supervisor import WorkerSpec
from millrace.conversations.tokenizer import open_decoder
from millrace.core import clock, model_version
from millrace.core.errors import ConfigError, LedgerError, after, alone, writing
from millrace.core.events import Events, Sink
from millrace.core.placement import Place
from millrace.core.wings import TARGETS
from millrace.devices.inventory import read_host
from millrace.diagnose.examine import CanaryWatch, count_rewards, evidence_of
from millrace.diagnose.rules import DoctorWatch
from millrace.episodes.agents.agent_process import DIRECTORY, remove_directory
from millrace.episodes.snapshots import stream_of, sweep
from millrace.ledger.reading import LedgerReader
from millrace.ledger.sqlite import SqliteLedger
from millrace.observe.live.live_view import LiveView, LostReaders
from millrace.observe.sinks.jsonl import replay_events
from millrace.observe.sinks.log_files import parts
from millrace.observe.sinks.open_sinks import open_sinks
from millrace.observe.summary import Summary
from millrace.placement.assign import Placement
from millrace.placement.hosts import Layout, computes_on_gpus, joining_places, lay_out
from millrace.placement.memory.needs import read_needs
from millrace.placement.model_directory import adapter_shapes
from millrace.rollout.engine_kinds import ENGINES
from millrace.rollout.protocol import EngineOptions, NativeAdapter
from millrace.run import run_hosts
from millrace.run.content_digests import (
    content_digests,
    other_sources,
    refuse_other_start,
    source_digests,
)
from millrace.run.event_sources import MemoryReporter, TrajectorySampler
from millrace.run.resume import with_date
from millrace.run.run_hosts import Joining
from millrace.run.scaling import obey, with_scaling
from millrace.run_directory.run_directory import RunDirectory, moments_of
from millrace.runtime.local.local_runtime import LocalRuntime
from millrace.runtime.process import ONE_HASH_SEED, allow_open_files, check_kernel, dump_stacks, dumping
from millrace.schedule.presets import build
from millrace.weights.store.directory import Directory

PRELOAD = (
    "millrace.rollout.replica",
    "millrace.trainer.role",
    "millrace.trainer.files.checkpoint",
    "millrace.episodes.reward_worker",
    "millrace.weights.relay",
)
"""The forkserver imports these modules once, for all workers."""


REPLICA_IN_TURNS = "millrace.rollout.replica:SharedReplica"
TRAINERS = {"torch": "millrace.trainer.role:TorchTrainer", "jax": TARGETS["jax.trainer"]}
TRAINER_IN_TURNS = "millrace.trainer.role:SharedTrainer"
"""The roles where one device is lent in turns."""

REPORTS_PER_S = 256
"""The most reports of all replicas together. On Ray this number costs a third of the controller's core."""
REPORTS_PER_TIMEOUT = 2
"""The fewest reports of a replica within `supervision.heartbeat_timeout_s`, which ends a silent replica."""
EARLY_REPORTS = 5
"""Of what has ended, in an interval of reports at most, while trajectories wait for a slot."""
LOOKS_PER_INTERVAL = 100
"""Of the trainer and of reward workers for work, in a large fleet's interval of reports."""
SERVER_WAIT = 0.8
"""Of `supervision.spawn_timeout_s`, how long a replica waits for its server to answer."""

_LIBRARY = {"gym": "reasoning_gym", "math": "math_verify"}
"""The library of a kind of task or reward. Its import takes a second, which the forkserver spends once."""


async def train(
    config: Config,
    run: RunDirectory,
    stop: asyncio.Event,
    *sinks: Sink,
    console: Console | None = None,
    from_version: int | None = None,
) -> None:
    """Start or resume the run in `run`. `from_version`: first go back to this version. Setting `stop` ends
    the run after the step under way.

    The live view is drawn on `console`, by default on stdout. Print on that console only: the lines appear
    above the view. The view would draw over a print on another console.

    Raises: the run's first fatal error. In every case the ledger is flushed and `summary.json` written.
    """
    events, summary, evidence = Events(clock.now, clock.wall), Summary(), evidence_of(config)
    view = LiveView(console)
    async with AsyncExitStack() as stack:
        stack.callback(os.umask, os.umask(0o077))  # only the owner may read the files of this run
        about = {
            "id": f"{run.path.name}-{uuid4().hex}",  # stays the same when the run directory is moved
            "config_digest": config_digest(config),
            "seed": config.seed,
            "content": content_digests(config),
            "sources": source_digests(config),
            "hash_seed": ONE_HASH_SEED["PYTHONHASHSEED"],
        }
        ledger = SqliteLedger(run.ledger, run=about)
        stack.push(lambda _, error, __: _close(ledger, error))  # its lock came first
        refuse_other_start(ledger.run, about)
        config, scaling_state = with_scaling(with_date(config, run), run)
        run.write_config(config)
        if parts(run.events):
            replay_events(run.events, (summary, evidence, view.status.speeds), summary.result)
            with suppress(LedgerError), LedgerReader(run.ledger, check=False) as reader:
                count_rewards(evidence, reader)  # for the doctor alone
        owner = ledger.run.get("id", "")
        await stack.enter_async_context(open_sinks(events, config.observe, run.path, recorded(config), owner))
        stack.push(lambda _, error, __: _write_summary(run, summary, error))
        every: list[Sink] = [summary, stack.enter_context(view), *sinks]
        # These sinks emit events of their own, after all other sinks have received the event before.
        every += [MemoryReporter(events), DoctorWatch(events, evidence)]
        every += [LostReaders(events, [console, *sinks]), *_samplers(config, ledger, events, run.ledger)]
        for sink in every:
            events.subscribe(sink)
        for key, reason in other_sources(ledger.run, about):
            events.emit("warned", source=key, reason=reason)
        if from_version is not None:
            _go_back(run, ledger, events, from_version)
        _refuse_newer_checkpoints(run, ledger)
        if config.weights.directory is not None:
            Directory(config.weights.directory, owner).refuse_other()
        async with _runtime(config, run) as runtime:
            workers = fleet(config, run, owner)
            controller = Controller(
                config,
                fleet=dataclasses.replace(workers, replicas=workers.replicas[: scaling_state.replicas]),
                runtime=runtime,
                ledger=ledger,
                schedule=build(config),
                events=events,
                checkpoints=str(run.checkpoints),
                export=str(run.model),
                on_stall=partial(_dump_stacks, run, runtime),
                pace=pace(config),
            )
            scale = obey(run, controller, events, scaling_state)
            with dumping(partial(_dump_stacks, run, runtime)):
                await _attended(controller, stop=_stop_when(stop, controller), scale=scale)


async def _attended(controller: Controller, **attendants: Coroutine[Any, Any, None]) -> None:
    """Run the controller to its end, and `attendants` until then. Raises: what the controller raises."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(attendant, name=name) for name, attendant in attendants.items()]
            await controller.run()
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise alone(failures) from None


def _sweep_snapshots(run: RunDirectory) -> None:
    """Remove the snapshots that no trajectory goes on from."""
    with suppress(LedgerError), LedgerReader(run.ledger, check=False) as reader:

        def goes_on(trajectory_id: int) -> bool:
            trajectory = reader.find(trajectory_id)
            return trajectory is not None and not answered([trajectory])

        sweep(run.path, goes_on)


def _samplers(config: Config, ledger: SqliteLedger, events: Events, path: Path) -> Iterator[Sink]:
    """Sinks that read texts of the ledger, whose file is `path`."""
    every, decode = config.observe.samples_every, open_decoder(config.model.path)
    if every is not None and decode is not None:
        yield TrajectorySampler(events, ledger, decode, every)
    if any(one.canary for one in config.evaluations):
        yield CanaryWatch(events, path, decode, config.evaluations)


def _go_back(run: RunDirectory, ledger: SqliteLedger, events: Events, version: int) -> None:
    """The ledger goes back first: nobody resumes from a checkpoint that the ledger lacks."""
    ended = ledger.rewind(version)
    undone = [run.checkpoint(saved) for saved in run.versions() if saved > version]
    undone += [run.model] if model_version.read(run.model) > version else []
    for path in undone:
        if not path.is_symlink():
            with writing(path, "See who may remove it, and repeat the command"):
                shutil.rmtree(path)
    events.emit("rewound", version=version, trajectories=ended)
    run.forget_evaluations(after=version)


def _refuse_newer_checkpoints(run: RunDirectory, ledger: SqliteLedger) -> None:
    """A version is committed before its checkpoint is saved. So a checkpoint newer than the ledger means that
    the ledger is an older copy."""
    version, saved = ledger.version, max(run.versions(), default=0)
    if saved > version:
        raise LedgerError(
            f"ledger {run.ledger}: it holds {version} committed steps, and checkpoints/v{saved:08d} is of "
            f"step {saved}: this is an older copy, its write-ahead log was lost, or `--from-version` was "
            "interrupted\n"
            "  Restore both from one backup. To go on without the lost steps: `millrace train --resume "
            f"--from-version {version}`."
        )


def fleet(config: Config, run: RunDirectory, owner: str = "") -> Fleet:
    """The workers of a run.

    Raises: ConfigError: they do not fit on its hosts.
    """
    placed = (layout := place(config)).main
    rollout, plain = config.rollout, recorded(config)
    replica: dict[str, Any] = {
        "engine": rollout.engine,
        "open_reader": "millrace.weights.ring:open_reader",
        "report_interval_s": report_interval_s(config),
        "early_interval_s": report_interval_s(config) / EARLY_REPORTS,
    }
    options, servers = engine_options(config, run, placed), rollout.servers or ("",) * len(layout.replicas)
    trainer: dict[str, Any] = {
        "config": plain,
        "run_dir": str(run.path),
        "device": placed.device,
        "device_share": layout.trainer.share,
        "open_writer": "millrace.weights.ring:open_writer",
    }
    if (moments := moments_of(run, config)) is not None:
        trainer["moments"] = str(moments)

    def spec(name: str, its_place: Place, server: str = "") -> WorkerSpec:
        kwargs = {
            "name": name,
            "options": replace(options, device_share=its_place.share, server=server),
            **replica,
        }
        target = REPLICA_IN_TURNS if rollout.colocated else "millrace.rollout.replica:EngineReplica"
        return WorkerSpec("replica", name, target, kwargs, its_place, ENGINES[rollout.engine].spawn_s_max)

    apart = places_apart(config, layout)
    relay = partial(_relay, config, layout, token_hex(32), owner)
    joining = Joining(config, layout, replica=spec, relay=relay, apart=apart)
    first = WorkerSpec(
        "trainer",
        "trainer",
        TRAINER_IN_TURNS if rollout.colocated else TRAINERS[config.trainer.backend],
        trainer,
        layout.trainer,
    )
    return Fleet(
        trainer=first,
        standby=standby_of(first) if config.trainer.standby else None,
        relays=tuple(map(relay, layout.placements)),
        replicas=tuple(
            spec(f"replica-{i}", its_place, server)
            for i, (its_place, server) in enumerate(zip(layout.replicas, servers, strict=True))
        ),
        reward_workers=tuple(
            WorkerSpec(
                "reward worker",
                f"reward-worker-{i}",
                "millrace.episodes.reward_worker:TaskRewardWorker",
                {"config": plain, "run_dir": str(run.path)},
                its_place,
            )
            for i, its_place in enumerate(layout.reward_workers)
        ),
        join=joining.join,
        relay=joining.relay,
        look=joining.look,
        evaluator=dataclasses.replace(spec("evaluator", apart[0]), role="evaluator")
        if config.evaluations
        else None,
        evaluation_reward_workers=tuple(evaluation_reward_workers(config, layout, str(run.path))),
        reference=_reference(plain, placed, apart[-1]) if config.reference_apart else None,
    )


def report_interval_s(config: Config) -> float:
    """Of each replica. Within the interval a replica reports only what has ended."""
    rollout, timeout_s = config.rollout, config.supervision.heartbeat_timeout_s
    fleet_s = rollout.replicas / REPORTS_PER_S
    return max(rollout.report_interval_s, min(fleet_s, timeout_s / REPORTS_PER_TIMEOUT))


def pace(config: Config) -> Pace:
    """Of the run's loops. The interval of reports grows with a fleet, and `look_s` with the interval: to
    0.05 s at 2,000 replicas. So one call asks for many scores."""
    gathered_s = report_interval_s(config) - config.rollout.report_interval_s
    return Pace(look_s=gathered_s / LOOKS_PER_INTERVAL)


def places_apart(config: Config, layout: Layout) -> list[Place]:
    """The evaluator's place, then the reference's place, if the run has them. They are places of replicas,
    apart from those of `rollout.replicas`. The trainer's host comes first: its relay gets every version.

    Raises: ConfigError: there is no room for them.
    """
    keys = ["`evaluations`"] * bool(config.evaluations) + ["`algorithm.reference`"] * config.reference_apart
    with suppress(ConfigError):
        main = dataclasses.replace(layout, placements=(layout.main,))
        return joining_places(config, main, layout.replicas, len(keys))
    try:
        return joining_places(config, layout, layout.replicas, len(keys))
    except ConfigError as error:
        raise ConfigError(
            f"{' and '.join(keys)}: for each there is a process that takes as much as a replica: {error}.\n"
            f"  Lower `rollout.replicas` ({config.rollout.replicas}), leave `evaluations` out and run "
            '`millrace eval` on checkpoints, or set `algorithm.reference` to "trainer"'
        ) from None


def _reference(config: dict[str, Any], placed: Placement, its_place: Place) -> WorkerSpec:
    kwargs = {"config": config, "device": placed.device, "device_share": its_place.share}
    target = "millrace.trainer.role:ReferenceWorker"
    return WorkerSpec("reference", "reference", target, kwargs, replace(its_place, python=None))


def evaluation_reward_workers(config: Config, layout: Layout, run_dir: str) -> Iterator[WorkerSpec]:
    """The reward worker of each evaluation."""
    for evaluation in config.evaluations:
        kwargs = {
            "config": recorded(config.of_evaluation(evaluation)),
            "answers": evaluation.samples > 1,
            "run_dir": run_dir,
            "wrong_gold": evaluation.canary == "wrong-gold",
            "stream": stream_of(evaluation.name),
        }
        name, target = (
            f"reward-worker-{evaluation.name}",
            "millrace.episodes.reward_worker:TaskRewardWorker",
        )
        yield WorkerSpec("reward worker", name, target, kwargs, layout.reward_workers[0])


def _relay(config: Config, layout: Layout, secret: str, owner: str, placed: Placement) -> WorkerSpec:
    """The relay of one host. Relays of several hosts recognise each other by the `secret`, new at each start.
    `owner` is the id of the run, for `weights.directory`."""
    alone = layout.placements == (placed,)
    name, weights = "relay" if alone else f"relay-{placed.host.name}", config.weights
    capacity = {"slots": placed.relay_slots, "versions": placed.relay_versions}
    kwargs: dict[str, Any] = {"name": name, **capacity}
    if weights.directory is not None:
        kwargs |= {"directory": weights.directory, "anchor_every": weights.anchor_every, "owner": owner}
    if placed.host.address:
        kwargs |= {"address": placed.host.address, "secret": secret, "transport": weights.transport}
    return WorkerSpec("relay", name, "millrace.weights.relay:RelayWorker", kwargs, placed.relay)


def engine_options(config: Config, run: RunDirectory, placed: Placement) -> EngineOptions:
    """The options of every replica, without its share of a device and its server."""
    rollout = config.rollout
    return EngineOptions(
        model_path=config.model.path,
        dtype=config.model.dtype,
        adapter_scale=None if rollout.native_adapters else config.adapter.scale,
        native_adapter=_native_adapter(config) if rollout.native_adapters else None,
        device=placed.device,
        tensor=rollout.tensor,
        slots=rollout.slots,
        max_sequence_tokens=rollout.max_sequence_tokens,
        prefill_chunk=rollout.prefill_chunk,
        exact=rollout.exact,
        recompute=rollout.recompute,
        keep_kv=config.keeps_kv,
        quantization=rollout.quantization,
        stepwise=rollout.stepwise,
        seeded=rollout.seeded,
        probe=rollout.probe,
        drafts=rollout.drafts,
        draft_tokens=rollout.draft_tokens,
        draft_rows_max=rollout.draft_rows_max,
        draft_model=rollout.draft_model,
        colocated=rollout.colocated,
        server_wait_s=SERVER_WAIT * config.supervision.spawn_timeout_s,
        shared_dir=rollout.shared_dir or str(run.weights),
    )


def _native_adapter(config: Config) -> NativeAdapter:
    adapter = config.adapter
    assert adapter.rank is not None and adapter.scale is not None, "refused by `Config`"
    matrices = adapter_shapes(Path(config.model.path), adapter)
    targets = {name.rpartition(".")[2] for name in matrices}
    return NativeAdapter(adapter.rank, adapter.scale, tuple(sorted(targets)))


def place(config: Config) -> Layout:
    """Who runs where.

    Raises: ConfigError: it does not fit. DataError: the model's files. WorkerError: no worker can run here.
    """
    check_kernel()
    hosts = run_hosts.hosts(config, read_host())
    memory = ENGINES[config.rollout.engine].memory
    needs = read_needs(config, on_gpu=computes_on_gpus(config, hosts), replica_memory=memory)
    layout = lay_out(config, hosts, needs)
    if isinstance(config.runtime, LocalHosts):
        allow_open_files(len(layout.replicas) + len(layout.reward_workers) + len(layout.placements) + 1)
    return layout


@asynccontextmanager
async def _runtime(config: Config, run: RunDirectory) -> AsyncIterator[run_hosts.ProcessRuntime]:
    """The runtime of the run. What workers that were killed have left is removed before and after."""
    run.logs.mkdir(mode=0o700, exist_ok=True)
    remove_directory(run.path / DIRECTORY)
    _sweep_snapshots(run)
    runtime = (
        _local_runtime(config, run)
        if isinstance(config.runtime, LocalHosts)
        else run_hosts.on_cluster(config, run)
    )
    try:
        yield runtime
    except BaseException as error:
        with after(error):
            await runtime.close()
        raise
    else:
        await runtime.close()
    finally:
        remove_directory(run.path / DIRECTORY)
        _sweep_snapshots(run)


def _local_runtime(config: Config, run: RunDirectory) -> LocalRuntime:
    timeout_s = config.supervision.heartbeat_timeout_s
    parts = config.by_part.values()
    rewards = (reward for part in parts for reward in members_of(part.reward).values())
    kinds = {*(part.task.kind for part in parts), *(reward.kind for reward in rewards)}
    preload = (*PRELOAD, *(library for kind, library in _LIBRARY.items() if kind in kinds))
    return LocalRuntime(
        preload,
        log_dir=run.logs,
        silence_s_max=3 * timeout_s,
        answer_s=timeout_s,
        hosts=run_hosts.logical(config),
    )


def _dump_stacks(run: RunDirectory, runtime: run_hosts.ProcessRuntime) -> None:
    """Write the controller's stacks into a file of their own, and each worker's into its log."""
    dump_stacks(run.logs / "controller.stacks")
    runtime.dump_stacks()


async def _stop_when(stop: asyncio.Event, controller: Controller) -> None:
    await stop.wait()
    controller.stop()


def _close(ledger: SqliteLedger, error: BaseException | None) -> None:
    with after(error):
        ledger.close()


def _write_summary(run: RunDirectory, summary: Summary, error: BaseException | None) -> None:
    """`error` ended the run, maybe before the controller began. `error` is reported first; a failure in here
    becomes a note on it."""
    with after(error):
        result = summary.result()
        if error is not None and result["reason"] is None:
            result |= {"ok": False, "reason": ended_by(error)}
        run.write_summary(result)
