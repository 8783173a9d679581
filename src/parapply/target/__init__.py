"""The target: catalogue facts, matching, statements, sessions and state tables. Starts no tasks."""
