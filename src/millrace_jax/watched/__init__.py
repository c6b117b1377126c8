"""What the trainer in JAX computes inside a forward pass."""
