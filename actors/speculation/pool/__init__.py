"""Drafting in processes of their own, which several targets share."""
