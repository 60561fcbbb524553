"""Migrations, one file per revision."""
