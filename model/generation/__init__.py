"""Reading prompts and writing continuations."""
