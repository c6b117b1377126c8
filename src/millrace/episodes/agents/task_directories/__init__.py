"""Tasks as directories in Harbor's format, without containers: an instruction, files, and tests."""
