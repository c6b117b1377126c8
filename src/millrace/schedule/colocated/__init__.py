"""One device in turns: what is decided when the trainer and the replicas share it (`rollout.colocated`)."""
