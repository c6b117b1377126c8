"""What a sample of completions says of a model: estimators and their intervals. Pure."""
