"""The manager: finds, claims and reclaims a sandbox for each task."""

__version__ = "0.1.0"
