"""What schedules do about the slowest of a batch, and the presets made of it."""
