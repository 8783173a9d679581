"""What a table of the target is like, and how it is applied."""
