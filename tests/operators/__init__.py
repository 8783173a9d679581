"""A state machine over operators' commands, on kept pairs of real servers: see README.md."""
