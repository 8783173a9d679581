"""Parts of the benchmark against real servers."""
