"""Tokenizers, prompts and training text."""
