"""A run: how it begins, is put together, is resumed, goes on from another run, is scaled and ends."""
