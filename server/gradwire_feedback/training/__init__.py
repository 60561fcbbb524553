"""Training and answering through a gradwire server: the connection, durable jobs, estimates, generation."""
