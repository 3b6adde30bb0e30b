"""Runs the documentation's snippets (`pytest docs README.md`, see tools/snippets.py) and skips
tests marked `gpu` or `browser` where the machine lacks what they need (see tools/needs.py)."""

import importlib.util

import needs
import pytest

if importlib.util.find_spec("sybil") and importlib.util.find_spec("yaml"):
    from snippets import pytest_collect_file as pytest_collect_file


def pytest_runtest_setup(item: pytest.Item) -> None:
    for tool in ("gpu", "browser"):
        reason = needs.lacking(tool) if item.get_closest_marker(tool) else None
        if reason and needs.required(tool):
            pytest.fail(f"PARARNN_REQUIRE names {tool}, but {reason}", pytrace=False)
        if reason:
            pytest.skip(reason)
