"""The numerics contract of `pararnn` as a test suite: `pytest conformance`.

It uses public names only, so it runs from a clone and against an installed wheel alike.
"""
