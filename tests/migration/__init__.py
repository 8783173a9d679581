"""A migration with a writer, kills and schema changes, the cut-over and the way back, and whether a write was lost."""
