"""How is a stream kept in files, and applied from them? The daemon imports nothing of it."""
