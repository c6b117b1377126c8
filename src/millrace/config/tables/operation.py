"""`[runtime]`, `[weights]`, `[supervision]`, `[checkpoints]` and `[observe]`: on which hosts workers run,
what keeps a run going, and who sees it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from millrace.config.tables.section import SECONDS_MAX, Count, CountOrZero, Seconds, Section


class Weights(Section):
    slots: int | None = Field(default=None, ge=2, le=1024)
    """Most versions that the relay holds whole. `"none"`: the staleness bound + 3, at most 8; 2 of versions
    of more than 64 MB. On a host without room the relay holds fewer, at least 2. It keeps older ones, up to
    the staleness bound + 3, as deltas, in half of the memory of one."""
    directory: str | None = None
    """Directory or bucket in which the trainer's relay stores versions, as a URL of fsspec: `file:///shared/run`,
    `s3://bucket/run`, `gs://bucket/run`. Relays that reach no other relay read from it."""
    anchor_every: Count = 20
    """Versions in `directory` from one whole one to the next. Those between are stored as changes."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """How the relays of several hosts move weights. `"nixl"`: each relay pulls them from the memory of
    another, through NIXL and UCX (extra `millrace[nixl]`). It pays with RDMA only. Deltas and all that is
    said stay on the authenticated connection. UCX listens on ports of its own, which ask for no secret: use
    it in a network that only the run can reach."""

    @field_validator("directory")
    @classmethod
    def _url(cls, directory: str | None) -> str | None:
        if directory is not None and "://" not in directory:
            raise ValueError(f"`weights.directory` ({directory}) must be a URL, as file:///shared/run")
        return directory


class Supervision(Section):
    heartbeat_timeout_s: float = Field(default=10.0, ge=2, le=SECONDS_MAX)
    """A worker that does not answer a heartbeat within this time is killed and restarted. So is a replica
    that sends no report for this time. A worker that hears nothing from the controller for three times this
    time stops itself."""
    restarts: CountOrZero = 5
    """Most restarts of one worker within `restart_window_s`. At the next death the worker is given up
    where others do its work, and otherwise the run stops."""
    restart_window_s: Seconds = 300.0
    """Window in which restarts are counted."""
    backoff_s: float = Field(default=0.1, ge=0, le=10)
    """Time before the first restart. The time doubles with each restart, up to 10 s."""
    attempts: Count = 3
    """A prompt is quarantined after this many deaths of replicas in a row. A death counts for a trajectory
    that the replica decoded and that has no new token."""
    stall_s: float = Field(default=300.0, ge=1, le=SECONDS_MAX)
    """After this time without progress the run stops and says who waits for whom. Waiting for a step, a load
    or a reward within its own deadline is no stall. After 20 s without progress the run says who waits for
    whom, and goes on."""
    step_timeout_s: float = Field(default=600.0, ge=1, le=SECONDS_MAX)
    """Longest time for any command to a worker in which the worker counts no progress: no bytes, tensors or
    rows. After the first command of its kind (a step, a pull), the limit is ten times the longest such time
    so far, at least 20 s. A worker that does nothing in a command is killed after 20 s."""
    spawn_timeout_s: float = Field(default=120.0, ge=1, le=SECONDS_MAX)
    """Time from a worker's start until it must be ready. A replica with vLLM has at least 900 s."""
    stop_grace_s: Seconds = 25.0
    """After SIGTERM or Ctrl-C, the time for the step under way and its checkpoint. A longer step is left, and
    done again on a resume. Slurm, Kubernetes and clouds kill 30 s after SIGTERM. If yours waits longer, set
    a little less than that."""


class Checkpoints(Section):
    every: Count = 20
    """Versions between two checkpoints. A run always ends with a checkpoint."""
    keep: Count = 2
    """Number of newest checkpoints that are kept."""


def _listening(value: object) -> object:
    """A port alone is one of this host's loopback address."""
    host, _, port = str(value).rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65_535 or not host.strip("[]").isascii():
        raise ValueError(f"`observe.prometheus` ({value}) must be PORT or HOST:PORT, the port 1 to 65535")
    return f"{host or '127.0.0.1'}:{port}"


ListenAddress = Annotated[str, BeforeValidator(_listening)]


class Observe(Section):
    tags: list[str] = Field(default=[])
    """Words for people, by which the list of runs of `millrace ui` finds and groups."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""
    wandb: str | None = None
    """W&B project. Needs the `wandb` extra."""
    mlflow: str | None = None
    """MLflow experiment. Needs the `mlflow` extra."""
    trackio: str | None = None
    """Trackio project. Needs the `trackio` extra."""
    prometheus: ListenAddress | None = None
    """Serve metrics for Prometheus at this `HOST:PORT`. A port without a host is on 127.0.0.1. Needs the
    `prometheus` extra."""
    notify: str | None = None
    """A command line or a URL that is told of stalls, deaths of workers, findings of the doctor, and the end.
    A command gets a JSON object on its standard input, a URL gets the object by POST. `$NAME` is the value
    of the environment variable NAME. The run directory keeps only the host of a URL. See docs/watching.md."""
    samples_every: Count | None = 10
    """Steps between samples: the best, the middle and the worst answer to one prompt of the batch, as text.
    Samples go to the live view, to `events.jsonl`, and to TensorBoard, W&B, MLflow and Trackio where these
    are on.
    `"none"`: no samples."""


# ---------------------------------------------------------------- runtime


class LocalHosts(Section):
    """Processes of this machine."""

    kind: Literal["local"] = "local"
    hosts: int = Field(default=1, ge=1, le=64)
    """Number of logical hosts that the machine's memory and GPUs are divided among. Each has a relay of its
    own. More than 1 shows on one machine what a cluster does; see docs/cluster.md."""


class RayCluster(Section):
    """The nodes of a Ray cluster. Needs the `ray` extra."""

    kind: Literal["ray"] = "ray"
    address: str = "local"
    """`HOST:PORT` of the cluster's head, as `ray start --head` prints it. It is never guessed from the
    environment. `"local"`: a cluster of this machine alone, for as long as the run. See docs/cluster.md."""


Runtime = Annotated[LocalHosts | RayCluster, Field(discriminator="kind")]
