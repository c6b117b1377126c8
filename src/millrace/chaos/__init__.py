"""A run under attack, in real processes: what is done to it, and what must hold afterwards."""
