"""The tables, their migrations, and the connection to SQLite or PostgreSQL."""
