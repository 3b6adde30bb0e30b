"""Recurrent cells for PyTorch that train in parallel over time."""

__version__ = "0.1.0"
