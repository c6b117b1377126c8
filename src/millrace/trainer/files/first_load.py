"""What the first load of a model in a process imports and compiles, whatever the family.

The forkserver imports this module once, for 0.25 s of CPU. So no load of a trainer does it again: the load of
a small model took 0.44 s of CPU, and takes 0.12.
"""

from contextlib import suppress

with suppress(ImportError):  # another version of transformers: each load does it
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401  it imports what all families share

    get_checkpoint_conversion_mapping("")  # compiles the patterns of all families, and keeps them
