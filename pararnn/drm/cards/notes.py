"""The notes that every part follows."""

from pararnn.cells import Source

NOTES = Source(
    key="muniz2026notes",
    authors="Muniz",
    title="Mathematical Notes",
    venue="the notes on the DRM language emitter, 31 July 2026",
    year=2026,
    arxiv="",
    equations="",
    bibtex="""@misc{muniz2026notes,
  title  = {Mathematical Notes},
  author = {Muniz, Felipe Maya},
  year   = {2026},
  note   = {docs/math.md of the drm-language-emitter, commit 5b32a34}
}""",
)
"""The notes that every part follows; a part adds its sections."""
