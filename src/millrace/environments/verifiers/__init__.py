"""Rewards that ask a judge or check a form: one file a kind, and what it needs."""
