"""Estimators of a model's accuracy from sampled completions, and their intervals. Pure."""
