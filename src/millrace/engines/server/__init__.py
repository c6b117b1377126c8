"""A running `vllm serve` as an engine.

client     its routes, one method each
probe      what it offers, and what is missing
handover   a version as a file that it can load
streams    requests that stream tokens, on a thread of their own
engine     the engine protocol on these
opening    puts them together
"""
