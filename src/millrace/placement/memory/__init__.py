"""How many bytes does it need? All estimates of memory and disk. Of files, only headers are read.

needs               each worker of a run, a checkpoint, the disk: from the model's directory
activation_memory   what a step of the trainer or of a replica needs for a moment
engine_memory       what any process keeps, and a replica by its engine; a model and devices that are not
                    here, by their dimensions: for the simulator
model_shape         the dimensions of a model, bytes of a number, keys and values of a token

`assign` adds these up on each device and host.
"""
