"""From the stream to closed batches."""
