"""Text and tokens of conversations: tokenizer, chat templates, and the forms of calls in them."""
