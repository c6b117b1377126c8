"""The trainer in JAX, for `trainer.backend = "jax"`. It needs no torch.

Read in this order:

decoder         a decoder, from its Hugging Face configuration, with its rotary frequencies
weights         Hugging Face's tensors as a tree with stacked layers, and back
adapter_tree    LoRA: its tree
adapted_matmul  LoRA: products with merged matrices
forward         the decoder's forward pass, and attention in a row of prefix trees
row_arrays      packed rows as arrays of few shapes
gradients       the gradient of a batch's loss, and log-probs of tokens, a chunk of the logits at a time
optimizer       AdamW
policy          the optimizer steps of one batch, and the statistics of its tokens
publisher       a version into a relay's slot
role            the trainer as a worker
traced_values   named values inside the trainer's own program
devices         a mesh of devices by one table of axis rules; simulated devices; compiled programs
files           checkpoints, model directories, and the policy of a run
"""
