"""The live view: the status of a run, as a panel, as plain lines and as JSON."""
