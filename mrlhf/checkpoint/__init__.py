"""Weights in and out: Hugging Face folders and Megatron distributed checkpoints."""
