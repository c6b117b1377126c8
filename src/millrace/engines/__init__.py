"""The three engines behind `rollout.protocol.Engine`: our own, vLLM in a replica, vLLM as a server."""
