"""Checks of the numerics contract, and the oracles that they compare with."""
