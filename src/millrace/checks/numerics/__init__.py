"""Why log-probs disagree: where trainer and engine first differ from transformers in float64."""
