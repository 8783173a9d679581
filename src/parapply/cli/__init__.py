"""The command line: its texts, and the choice of the room that does the work."""
