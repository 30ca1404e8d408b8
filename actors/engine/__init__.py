"""The decoding engine: drafts propose, the target verifies, the output law stays the target's."""
