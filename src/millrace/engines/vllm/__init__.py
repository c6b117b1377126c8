"""vLLM as an engine. Only the replica's interpreter imports `vllm`, when it opens the engine.

vllm_versions    the supported releases
vllm_arguments   the arguments of vLLM for sampling and for drafts
start            the settings of vLLM's process and of the engine
mode             what both modes share, and the engine protocol on `LLMEngine`, one step at a time
async_engine     the engine protocol on `AsyncLLM`: vLLM generates beside the replica
extension        the methods that vLLM's worker processes get
loading          a version, or an adapter, from the relay's memory into the model
proof            the proof that vLLM computes with the published weights
processes        vLLM's processes: ranks of a divided model, and sockets
"""
