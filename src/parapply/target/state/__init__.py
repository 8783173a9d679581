"""Records on the target."""
