"""The place of each worker: what a run needs (`needs`), the decision on one host (`assign`), on several hosts
(`hosts`) and for joining replicas (`joining`), and the number format (`number_format`)."""
