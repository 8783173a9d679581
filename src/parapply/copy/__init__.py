"""The initial copy of tables, and the hand-over to the stream. Not needed by the daemon."""
