"""The daemon in the sandbox."""

__version__ = "0.1.0"
