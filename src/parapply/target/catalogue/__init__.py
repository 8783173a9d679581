"""Tables of the target: their properties, and how they are applied."""
