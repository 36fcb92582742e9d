"""A run rank by rank without its memory: real builders and real passes on tensors that have a shape and no content."""
