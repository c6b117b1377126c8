"""mini-swe-agent, whose one tool is the shell. Only the rewards are for Millrace.

Needs: pip install mini-swe-agent. Its command is trained too, with `submitted` as the reward:

    [reward.agent]
    command = ["mini", "--model", "openai/policy", "--task", "{prompt}", "--yolo", "--exit-immediately",
               "--output", "end.json"]
    variables = { MSWEA_CONFIGURED = "true", MSWEA_COST_TRACKING = "ignore_errors" }
"""

import json
from pathlib import Path

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

CONFIG = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())
PROMPTS = {name: CONFIG["agent"][name] for name in ("system_template", "instance_template")}


def solve(row, base_url, key):
    asked = {"api_base": f"{base_url}/v1", "api_key": key}
    config = {**CONFIG["model"], "model_kwargs": asked, "cost_tracking": "ignore_errors"}
    agent = DefaultAgent(LitellmModel(model_name="openai/policy", **config), LocalEnvironment(), **PROMPTS)
    return agent.run(row["prompt"])["submission"]


def reward(end, answer):
    return float((end.returned or "").strip() == answer)


def submitted(end, answer):
    written = Path(end.directory, "end.json")
    if not written.exists():
        return 0.0
    return float(json.loads(written.read_text())["info"]["submission"].strip() == answer)
