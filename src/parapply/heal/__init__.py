"""A slot that is lost is replaced, and only what differs is copied again."""
