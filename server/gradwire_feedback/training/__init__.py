"""Training and generation through a gradwire server: the connection, durable jobs, estimates, generation."""
