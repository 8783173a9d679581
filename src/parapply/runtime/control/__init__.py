"""What is durable, what is reported to the publisher, and what commands ask for."""
