"""Sweeps: many runs of one configuration with other keys and seeds, and one table that compares them."""
