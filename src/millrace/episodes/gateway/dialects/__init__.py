"""The dialects of requests: each as a `Call`, and each `Reply` as the dialect writes it."""
