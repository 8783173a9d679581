"""How the target is spoken to: settings, lease, pipeline, sessions, origins, prepared transactions."""
