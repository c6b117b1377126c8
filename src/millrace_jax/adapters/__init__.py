"""LoRA in JAX: the adapter as a tree of its own beside frozen weights."""
