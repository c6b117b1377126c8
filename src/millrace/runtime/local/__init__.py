"""The runtime of one machine: worker processes, forked by a forkserver."""
