"""Millrace from Python: what `import millrace` offers. Nothing here imports torch into the user's process."""
