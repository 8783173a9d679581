"""What is recorded on the target."""
