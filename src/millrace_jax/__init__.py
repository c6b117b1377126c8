"""The trainer in JAX, for `trainer.backend = "jax"`. It needs no torch.

Read in this order:

decoder          a decoder, from its Hugging Face configuration
rotary           rotary frequencies
weights          Hugging Face's tensors as a tree with stacked layers, and back
tree_attention   attention in a row of prefix trees
forward          the decoder's forward pass
target_logprobs  log-probs of tokens, a chunk of the logits at a time
row_arrays       packed rows as arrays of few shapes
gradients        the gradient of a batch's loss
optimizer        AdamW
statistics       the statistics of a step's tokens
policy           the optimizer steps of one batch
publisher        a version into a relay's slot
role             the trainer as a worker
adapters         LoRA: its tree, and products with merged matrices
recorded         token masks, which cut logits off
devices          a mesh of devices by one table of axis rules; simulated devices; compiled programs
files            checkpoints, model directories, and the policy of a run
"""
