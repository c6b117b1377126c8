"""The environment variables of an agent: where the gateway is, and nothing secret of the worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from millrace.core.errors import ConfigError

PASSED = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM"),
    *("PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
)
"""What an agent sees of the worker's own variables. A proxy or an API key is not among them."""
NEAR = ("127.0.0.1", "localhost")


def plain_variables(environment: Mapping[str, str], worker: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that does not know the gateway.

    Args:
        environment: the user's own. They come before all others.
        worker: the variables of this process.
    Raises: ConfigError: a name or a value that no process can have.
    """
    for name, value in environment.items():
        if not isinstance(value, str) or not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"the agent's environment variable {name!r} = {value!r} cannot be set: "
                "name and value are texts, without a zero byte, and the name without `=`"
            )
    own = os.path.dirname(sys.executable)
    variables = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/"}
    variables |= {name: worker[name] for name in PASSED if name in worker}
    if own not in variables["PATH"].split(":"):  # `python` is the Python of the run
        variables["PATH"] = f"{own}:{variables['PATH']}"
    return {**variables, "PYTHONUNBUFFERED": "1", **environment}


def agent_variables(
    environment: Mapping[str, str], worker: Mapping[str, str], *, base_url: str, key: str, row_path: str
) -> dict[str, str]:
    """The variables of an agent. Both SDKs find the gateway by them. Raises: as `plain_variables`."""
    base_url = base_url.rstrip("/")
    gateway = {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
    }
    variables = plain_variables({**gateway, **environment}, worker)
    variables["MILLRACE_ROW"] = row_path
    past = environment.get("NO_PROXY", environment.get("no_proxy", "")).split(",")
    hosts = dict.fromkeys(filter(None, [*past, *NEAR, urlsplit(base_url).hostname]))
    variables["NO_PROXY"] = variables["no_proxy"] = ",".join(hosts)
    return variables
