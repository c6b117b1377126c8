"""What simulated work takes: devices, models, lengths, generation, training and transport."""
