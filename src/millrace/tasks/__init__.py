"""Rows and prompts: files, hubs, reasoning-gym, mixtures, and which row each group has."""
