"""What a run leaves on disk: where its files are, its models, and what may change on resume."""
