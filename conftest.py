"""Lets `pytest docs README.md` run the snippets in the documentation (see tools/snippets.py)."""

import importlib.util

if importlib.util.find_spec("sybil") and importlib.util.find_spec("yaml"):
    from snippets import pytest_collect_file as pytest_collect_file
