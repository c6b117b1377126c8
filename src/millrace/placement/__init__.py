"""The place of each worker: what a run needs (`memory`), the decision on one host (`assign`), on several
hosts and for joining replicas (`hosts`), the number format (`number_format`), the threads of a worker
(`thread_plan`), and what a model's files say (`model_directory`)."""
