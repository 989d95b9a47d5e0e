"""HADS as an attention function: prompts, chunks, new tokens and training, and when each of them runs sparsely."""
