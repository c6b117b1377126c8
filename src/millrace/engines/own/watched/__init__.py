"""What the torch engine computes inside a forward pass."""
