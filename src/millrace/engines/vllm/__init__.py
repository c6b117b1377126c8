"""vLLM as an engine. `vllm` is imported when one is opened, by the interpreter of the replica alone.

versions   which releases are supported
opening    its settings
engine     the engine protocol on `LLMEngine`, one step at a time
asking     what it is asked to sample
loading    a version from the relay's memory into the model
ranks      the processes that it computes in, where the model is divided among devices
proof      that what it computes is what was published
"""
