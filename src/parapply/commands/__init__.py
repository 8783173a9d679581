"""What a one-shot command does. The daemon never imports this."""
