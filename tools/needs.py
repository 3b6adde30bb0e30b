"""What a check may need that a machine can lack, and the reason to give when it does.

`PARARNN_REQUIRE=node,browser` (CI sets it) turns the skips for these tools into failures.
"""

from __future__ import annotations

import importlib.util
import os
import shutil


def lacking(tool: str) -> str | None:
    """Why `tool` ("node", "browser" or "gpu") cannot be used here, or None if it can."""
    return {"node": _node, "browser": _browser, "gpu": _gpu}[tool]()


def required(tool: str) -> bool:
    names = [name.strip() for name in os.environ.get("PARARNN_REQUIRE", "").split(",")]
    return tool in names


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for path in map(shutil.which, names) if path), None)


def _node() -> str | None:
    import docs_hook

    return docs_hook.missing()


def _browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "the Python package playwright is not installed"
    if chromium() is None:
        return "no Chromium or Chrome is installed"
    return _node()  # the browser looks at the built site, which needs it


def _gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "no NVIDIA GPU is available"
    if importlib.util.find_spec("triton") is None:
        return "the Python package triton is not installed"
    return None
