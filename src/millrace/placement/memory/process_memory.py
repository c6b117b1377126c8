"""The memory that a process takes beside models."""

CONTEXT_BYTES = 500_000_000
"""Memory of a GPU that CUDA takes for each process that opens the GPU (an H100 with torch 2.x: 0.4 to 0.6
GB)."""
LIBRARIES_BYTES = 500_000_000
"""Memory of a replica's share that does not grow with the model: workspaces of cuBLAS (32 MiB a stream on an
H100), recorded decode steps, whole blocks of torch's allocator."""
FORK_BYTES = 100_000_000
"""Of a replica's process beside the memory that it keeps. A fork with a small model takes 40 MB that it does
not share. These bytes count for replicas that the run did not plan for at its start."""
WORKER_BYTES = 400_000_000
"""Python and torch in a worker that computes, beside what its placement counts."""
TRAJECTORY_BYTES = 1000
"""Of the controller's memory, at least, for each trajectory of a batch."""
