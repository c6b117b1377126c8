"""Requests as SDKs of agents sent them. `RECORD_REQUESTS=1 make test-agents` records them anew."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

REQUESTS = Path(__file__).parents[1] / "agents" / "requests"


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """By name: the SDK with its version, the path, and the body."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(REQUESTS.glob("*.json"))
    }
