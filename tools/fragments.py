"""Writes the generated pieces of the documentation, or checks that the committed ones are fresh.

A generator is a function `write(directory)` in the package that fills a directory with files.
Pages include them with `--8<-- "docs/_generated/..."`. They are committed, so that a change to a
cell shows in a diff what it changes for a reader; a committed file that differs is an error.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "docs" / "_generated"
GENERATORS = ("pararnn.cards:write_fragments",)


def write(directory: Path) -> list[str]:
    """Runs every generator that exists; returns the names of those that do."""
    ran = []
    for name in GENERATORS:
        module_name, _, function = name.partition(":")
        if importlib.util.find_spec(module_name) is None:
            continue
        generate = getattr(importlib.import_module(module_name), function, None)
        if generate is not None:
            generate(directory)
            ran.append(name)
    return ran


def files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def drift() -> list[str]:
    """What differs between the committed fragments and fresh ones, as unified diffs."""
    with tempfile.TemporaryDirectory() as temporary:
        if not write(Path(temporary)):
            return []
        fresh, committed = files(Path(temporary)), files(GENERATED)
    found = []
    for name in sorted({*fresh, *committed}):
        if fresh.get(name) != committed.get(name):
            lines = difflib.unified_diff(
                committed.get(name, "").splitlines(),
                fresh.get(name, "").splitlines(),
                f"committed docs/_generated/{name}",
                f"generated docs/_generated/{name}",
                lineterm="",
                n=1,
            )
            found.append("\n".join(list(lines)[:40]) or f"docs/_generated/{name}: line ends differ")
    return found


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        found = drift()
        for difference in found:
            print(difference, end="\n\n")
        if found:
            print(f"{len(found)} generated files are out of date; run: make fragments")
        return int(bool(found))
    GENERATED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        if not write(Path(temporary)):
            print("no generator exists yet; docs/_generated is left as it is")
            return 0
        fresh, committed = files(Path(temporary)), files(GENERATED)
    for name in committed.keys() - fresh.keys():
        (GENERATED / name).unlink()
    for name, text in fresh.items():
        if committed.get(name) != text:
            (GENERATED / name).parent.mkdir(parents=True, exist_ok=True)
            (GENERATED / name).write_text(text, encoding="utf-8")
            print(f"wrote docs/_generated/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
