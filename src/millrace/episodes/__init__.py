"""Completions of several turns: environments, tools, agents by HTTP, and the reward worker, a role."""
