"""How the controller lends a device that the trainer and the replicas share."""
