"""The Python API: the names of `import millrace`. Nothing here imports torch into the user's process."""
