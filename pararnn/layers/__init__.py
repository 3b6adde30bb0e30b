"""Layers around cells."""
