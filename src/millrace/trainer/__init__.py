"""Training: packing, log-probs, the optimizer step, checkpoints, and the trainer as a worker."""
