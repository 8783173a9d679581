"""Which single transactions depend on each other: for the apply log only, and by transaction, not by batch."""
