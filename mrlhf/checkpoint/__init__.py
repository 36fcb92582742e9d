"""Weights in and out: Hugging Face folders and Megatron distributed checkpoints."""

# Megatron-Core is imported there first, in its own way.
import mrlhf.megatron  # noqa: F401
