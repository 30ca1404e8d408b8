"""How draft tokens are made, how many, and which of them are accepted."""
