"""Keys and values of trajectories between two turns."""
