"""A running `vllm serve` as an engine.

client         the server's routes, one method each
probe          the offer of a server, and what a run misses there
handover       a version as a file that the server can load
streams        requests that stream tokens, on a thread of their own
server_engine  the engine protocol on client, handover and streams
connect        opens a server as an engine
"""
