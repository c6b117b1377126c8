"""Finds the best layout and its configuration for a model, devices and a staleness budget."""
