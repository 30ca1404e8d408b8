"""Paceline over HTTP against what a user would pick instead: `make bench-peers`."""
