"""Embedded PostgreSQL servers and the demonstration that runs on them; the daemon needs nothing from here."""
