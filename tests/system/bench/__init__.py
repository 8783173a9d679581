"""`parapply bench` in a process of its own."""
