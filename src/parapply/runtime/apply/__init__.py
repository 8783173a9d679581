"""From a closed batch to its commit."""
