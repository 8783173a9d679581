"""One edge of the program and a real PostgreSQL."""
