"""The numbers of a run that its state needs."""
