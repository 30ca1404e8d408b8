"""``paceline plan``: predict whether speculation pays on given hardware."""
