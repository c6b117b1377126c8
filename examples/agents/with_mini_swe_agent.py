"""mini-swe-agent: the shell is its only tool. Only `reward` is for Millrace.

Needs: pip install mini-swe-agent
"""

from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

CONFIG = yaml.safe_load(Path(package_dir / "config" / "mini.yaml").read_text())
PROMPTS = {name: CONFIG["agent"][name] for name in ("system_template", "instance_template")}


def solve(row, base_url, key):
    asked = {"api_base": f"{base_url}/v1", "api_key": key}
    model = LitellmModel(
        **{**CONFIG["model"], "model_kwargs": asked}, model_name="openai/policy", cost_tracking="ignore_errors"
    )
    return DefaultAgent(model, LocalEnvironment(), **PROMPTS).run(row["prompt"])["submission"]


def reward(end, answer):
    return float((end.returned or "").strip() == answer)
