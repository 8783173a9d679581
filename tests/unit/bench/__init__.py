"""What the benchmark computes and shows, without a server."""
