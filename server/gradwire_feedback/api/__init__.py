"""The REST API: parses requests, calls the use cases, formats answers."""
