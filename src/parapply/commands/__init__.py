"""The work of one-shot commands. The daemon never imports this."""
