"""The REST API: requests in, a use case, answers out."""
