"""Isolated containers on this machine."""
