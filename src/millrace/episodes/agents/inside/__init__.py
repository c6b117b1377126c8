"""What runs outside the reward worker: the launcher, and between it and each agent a warden."""
