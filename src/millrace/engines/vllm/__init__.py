"""vLLM as an engine. Only the replica's interpreter imports `vllm`, when it opens the engine.

versions         the supported releases
start            the settings of vLLM's process and of the engine
mode             what both modes share: tokens into continuations, and the proof
async_engine     the engine protocol on `AsyncLLM`: vLLM generates beside the replica
frontend         `AsyncLLM` on a thread of its own
extension        the methods that vLLM's worker processes get
vllm_engine      the engine protocol on `LLMEngine`, one step at a time
sampling_params  the arguments of vLLM's `SamplingParams`
loading          a version from the relay's memory into the model
adapter_slot     an adapter from the relay's memory beside the base weights
adapter_proof    the proof for adapters
memory           weights, keys and values of a worker that sleeps
rounding         what a quantised engine does to weights, for the proof
processes        vLLM's processes: ranks of a divided model, and sockets
proof            the proof that vLLM computes with the published weights
"""
