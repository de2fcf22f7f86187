"""Decisions with a stated error, from any score."""
