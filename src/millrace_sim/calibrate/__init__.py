"""The costs of a simulation, learnt from the directory of a real run."""
