"""Are both sides equal? Compared at one LSN while both are in use. Not needed by the daemon."""
