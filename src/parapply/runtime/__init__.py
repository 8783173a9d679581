"""The running daemon: its loop and the parts of it. The only package that starts tasks."""
