"""vLLM's own speculative decoding: its settings, its counts, and the repair of its sampler on a CPU."""
