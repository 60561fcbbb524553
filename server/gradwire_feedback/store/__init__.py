"""The use cases on the database: functions of a session, which neither commit nor depend on HTTP."""
