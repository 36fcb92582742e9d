"""Generation on sharded weights."""
