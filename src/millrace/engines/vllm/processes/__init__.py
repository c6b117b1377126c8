"""vLLM's processes beside a replica.

ranks         the executor of a model that is divided among devices
rank_end      what the replica is told of the first rank that ended
vllm_sockets  the sockets through which they talk
"""
