"""The real command in a subprocess, killed and restarted."""
