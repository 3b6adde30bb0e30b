"""The README shows the committed benchmark results, not a copy that drifted."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_shows_the_committed_table():
    results = sorted((ROOT / "benchmarks" / "results").glob("*-cpu-eager.md"))
    assert results, "no committed results of benchmarks/eager_cpu.py"
    table = results[-1].read_text().strip()
    assert table in (ROOT / "README.md").read_text()
    assert results[-1].name in (ROOT / "docs" / "benchmarks.md").read_text()
