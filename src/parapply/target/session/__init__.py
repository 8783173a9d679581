"""Communication with the target: settings, lease, pipeline, sessions, origins, prepared transactions."""
