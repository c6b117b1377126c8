"""A running server, vLLM or SGLang, as an engine.

server_dialect   what is said to a server, and what it answers
vllm_server      the dialect of `vllm serve`, and its settings
sglang_server    the dialect of SGLang, and its settings
client           calls over HTTP, for both, and requests that stream tokens
server_engine    the engine protocol on a dialect, and a version as a file that the server can load
connect          opens a server as an engine: which server answers, and what a run misses there
"""
