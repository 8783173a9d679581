"""The command line: what it says, and which room does it."""
