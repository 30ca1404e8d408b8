"""Decoding engine: drafts propose tokens, the target verifies them."""
