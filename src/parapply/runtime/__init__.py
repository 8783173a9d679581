"""What runs: the daemon's loop and the commands around it. The only package that starts tasks."""
