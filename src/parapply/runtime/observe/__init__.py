"""What is shown of a running daemon. Decides nothing."""
