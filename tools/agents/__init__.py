"""Coding agents from npm against the running server: see README.md."""
