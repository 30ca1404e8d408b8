"""Experts as processes of their own: a pool that several targets share."""
