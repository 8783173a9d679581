"""Which statements apply a change."""
