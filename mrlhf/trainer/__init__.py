"""Training loops: everything that puts roles together."""
