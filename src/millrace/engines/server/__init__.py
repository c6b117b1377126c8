"""A running server, vLLM or SGLang, as an engine.

dialect          what is said to a server, and what it answers
vllm_server      the dialect of `vllm serve`, whose settings `vllm_settings` reads
sglang_server    the dialect of SGLang, whose settings `sglang_settings` reads
client           calls over HTTP, for both
probe            which server answers, and what a run misses there
handover         a version as a file that the server can load
streams          requests that stream tokens, on a thread of their own
server_engine    the engine protocol on a dialect, handover and streams
connect          opens a server as an engine
"""
