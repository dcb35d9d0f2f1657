"""The version, in the one place that hatch and Python both read."""

__version__ = "0.1.0"
