"""Checks before a run starts: its configuration, its files, its hosts and the user's functions."""
