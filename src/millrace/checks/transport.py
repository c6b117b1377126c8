"""Does `weights.transport` work on every host that will have a relay? Checked before a run."""

from __future__ import annotations

import os
import subprocess
import sys

from millrace.config.schema import Config
from millrace.config.tables.operation import RayCluster
from millrace.core.errors import ConfigError
from millrace.core.wings import wing
from millrace.placement.hosts import Layout
from millrace.weights.chain.nixl.link import refuse_without_nixl

TRY_S = 60.0
NODE_S = 20.0
"""The additional time for a node's first process."""


def refuse_transport(config: Config, layout: Layout) -> None:
    """Raises: ConfigError: the transport is NIXL, and does not work on a host of `layout`. Names each
    host."""
    if config.weights.transport != "nixl":
        return
    if not isinstance(config.runtime, RayCluster):
        problems = [why_not()]
    else:
        cluster, names = (
            wing("ray.connect")(config.runtime.address),
            [placed.host.name for placed in layout.placements],
        )
        nodes = [node for node in cluster.nodes() if any(node.is_called(name) for name in names)]
        answers = cluster.ask(nodes, f"{__name__}:why_not", timeout_s=TRY_S + NODE_S)
        reasons = [_untried(answer) if isinstance(answer, Exception) else answer for answer in answers]
        problems = [
            reason and f"node {node.name}: {reason}" for node, reason in zip(nodes, reasons, strict=True)
        ]
    if any(problems):
        raise ConfigError("\n".join(filter(None, problems)))


def why_not() -> str:
    """Why NIXL does not work on this host, and what to do; empty if NIXL works. A short-lived process tries
    NIXL."""
    try:
        refuse_without_nixl()
        done = subprocess.run(
            [sys.executable, "-m", "millrace.weights.chain.nixl.trial"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=TRY_S,
            check=False,
        )
    except ConfigError as error:
        return str(error)
    except (OSError, subprocess.SubprocessError) as error:
        return _untried(error)
    if done.returncode == 0:
        return ""
    reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    return (
        f'`weights.transport` ("nixl") does not work here: {reason.rpartition("NIXL: ")[2]}\n'
        "  NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info tell more. Or leave the key at tcp"
    )


def _untried(error: Exception) -> str:
    return f'`weights.transport` ("nixl") cannot be tried: {error}'
