"""Tokenizers and chat templates that come with models."""
