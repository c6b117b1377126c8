"""What a run leaves on disk, for whoever reads it: its files, its models, its trajectories, its lineage."""
