"""Settings that do not go with drafts in vLLM. Names no torch and no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.core.errors import ConfigError

if TYPE_CHECKING:
    from millrace.config.schema import Config

HAVE_WEIGHTS = ("mtp", "eagle")
"""Sources that compute drafts with weights of their own."""


def refuse_beside_drafts(config: Config) -> None:
    """Raises: ConfigError, which names every setting that does not go with `rollout.drafts` in vLLM."""
    rollout, drafts = config.rollout, config.rollout.drafts
    if drafts is None:
        return
    reasons = []
    if config.sampling.min_p > 0:
        reasons.append("`sampling.min_p`: vLLM refuses each such request")
    if rollout.seeded:
        reasons.append(
            "`rollout.seeded`: what is drafted decides how much noise a token takes, so seeds would repeat "
            "nothing. Set it to false"
        )
    untried = {"tensor": rollout.tensor > 1, "quantization": rollout.quantization is not None}
    untried |= {"native_adapters": rollout.native_adapters}
    reasons += [f"`rollout.{key}`: nobody has tried both" for key, is_set in untried.items() if is_set]
    if drafts in HAVE_WEIGHTS and rollout.colocated:
        reasons.append("`rollout.colocated`: weights of drafts would not come back after a sleep")
    if drafts == "eagle" and rollout.draft_model is None:
        reasons.append("no `rollout.draft_model`: set it to the directory of an EAGLE head of the model")
    if drafts == "suffix" and rollout.draft_rows_max < rollout.slots:
        reasons.append(
            f"`rollout.draft_rows_max` ({rollout.draft_rows_max}): vLLM makes suffix drafts for any number "
            f"of rows. Set it to `rollout.slots` ({rollout.slots})"
        )
    if reasons:
        raise ConfigError(f"`rollout.drafts` ({drafts}) in vLLM does not go with\n  " + "\n  ".join(reasons))
