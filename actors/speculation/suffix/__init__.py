"""Model-free drafts: continuations of earlier occurrences of a sequence's last tokens."""
