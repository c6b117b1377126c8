"""A supervised warm start, outside a run (`millrace sft`)."""
