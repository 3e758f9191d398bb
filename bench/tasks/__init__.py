"""Tasks whose answers a program can check, generated from seeds, and their benchmark (`python -m bench.tasks`)."""
