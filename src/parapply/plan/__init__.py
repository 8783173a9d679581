"""Keys, net changes, batches, dependencies and the watermark. Computes only: no I/O, no clocks."""
