"""Tasks whose answers a program can check, generated from seeds; `python -m bench.tasks` runs them."""
