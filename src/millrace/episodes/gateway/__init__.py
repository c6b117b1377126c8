"""Agents as programs: a program asks for turns by HTTP, and a trajectory records them."""
