"""When a worker that answers heartbeats is stuck."""
