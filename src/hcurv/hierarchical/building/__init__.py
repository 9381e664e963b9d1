"""Build a hierarchical matrix level by level, from samples of its off-diagonal rows."""
