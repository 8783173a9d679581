"""The cut-over: the target takes over from the source without a lost row, and the source follows it from there on."""
