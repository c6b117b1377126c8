"""A model behind an OpenAI-compatible address, outside a run: `millrace serve`."""
