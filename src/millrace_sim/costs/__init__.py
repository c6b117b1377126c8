"""Costs of simulated work: devices, models, lengths, generation, training and transport."""
