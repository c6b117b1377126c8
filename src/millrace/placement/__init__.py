"""The place of each worker: what a run needs (`memory`), the decision on one host (`assign`), on several
(`hosts`) and for joining replicas (`joining`), the number format (`number_format`), and what a model's files
say (`model_directory`)."""
