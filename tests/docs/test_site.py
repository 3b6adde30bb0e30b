"""The built site: links that lead somewhere, formulas that are set, and a catalog that filters
from the keyboard, all opened from disk and without asking the network for anything."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import needs
import pytest

NARROW = {"width": 390, "height": 800}
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    reason = needs.lacking("node")
    if reason and needs.required("node"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    import catalog

    folder = tmp_path_factory.mktemp("site")
    assert catalog.build(folder) == 0
    return folder


# --------------------------------------------------------------------------------------
# Without a browser
# --------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """What a page refers to, and the places in it that others may refer to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.places: set[str] = set()
        self.images_without_text: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.places |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.add(values["href"])
        elif values.get("src"):
            self.loads.add(values["src"])
        if tag == "img" and "alt" not in values:
            self.images_without_text.append(values.get("src", "?"))


outline = functools.cache(Outline)


def pages(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if page.name != "404.html"]


def test_links_lead_somewhere(site):
    broken = []
    for page in pages(site):
        for link in outline(page).links | outline(page).loads:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data", "javascript"):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            where = f"{page.relative_to(site)}: {link}"
            if not target.exists():
                broken.append(f"{where} (no such file)")
            elif parts.fragment and target.suffix == ".html":
                # "__" marks places that the theme makes while the page is shown
                places = outline(target).places
                if unquote(parts.fragment) not in places and not parts.fragment.startswith("__"):
                    broken.append(f"{where} (no such place)")
    assert broken == []


def test_pages_load_nothing_from_elsewhere(site):
    remote = re.compile(r"(https?:)?//")
    for page in pages(site):
        assert [load for load in outline(page).loads if remote.match(load)] == [], page
    for sheet in (site / "assets").rglob("*.css"):
        loads = re.findall(r"url\(\s*['\"]?([^'\")]+)", sheet.read_text(encoding="utf-8"))
        assert [load for load in loads if remote.match(load)] == [], sheet


def test_images_have_a_text(site):
    assert [outline(page).images_without_text for page in pages(site)] == [[]] * len(pages(site))


def test_formulas_are_set_while_building(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'class="katex-html"' in home
    assert "<math " in home
    assert "arithmatex" not in home


def test_a_broken_formula_is_named():
    pytest.importorskip("mkdocs")
    import docs_hook

    if docs_hook.missing():
        pytest.skip(str(docs_hook.missing()))
    good, bad = docs_hook.render([("a^2", False), (r"\frac{1", True)])
    assert "<math" in good["html"]
    assert "KaTeX parse error" in bad["error"]


def test_every_fragment_is_on_a_page():
    docs = Path(__file__).resolve().parents[2] / "docs"
    prose = "\n".join(page.read_text(encoding="utf-8") for page in docs.rglob("*.md"))
    for fragment in docs.glob("_generated/**/*.md"):
        name = fragment.relative_to(docs.parent).as_posix()
        sections = re.findall(r"\[start:(\w+)\]", fragment.read_text(encoding="utf-8"))
        for what in [f"{name}:{section}" for section in sections] or [name]:
            assert f'"{what}"' in prose, f"no page includes {what}"


# --------------------------------------------------------------------------------------
# In a browser
# --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Containers and root need --no-sandbox; the pages are our own.
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        chromium = driver.chromium.launch(executable_path=needs.chromium(), args=quiet)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser) -> Iterator[Any]:
    """Opens a page and fails afterwards on errors in it and on anything that left the machine."""
    context = browser.new_context(viewport=WIDE)
    page = context.new_page()
    trouble: list[str] = []
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on(
        "console",
        lambda message: (
            message.type in ("error", "warning")
            and trouble.append(f"{message.type}: {message.text}")
        ),
    )
    page.on("requestfailed", lambda request: trouble.append(f"failed: {request.url}"))
    page.on(
        "request",
        lambda request: (
            urlsplit(request.url).scheme not in ("file", "data", "blob")
            and trouble.append(f"asked for {request.url}")
        ),
    )
    yield page
    context.close()
    assert trouble == []


def tab_to(page: Any, selector: str) -> None:
    for _ in range(80):
        if page.evaluate("(s) => document.activeElement.matches(s)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} cannot be reached with the Tab key")


def shown(page: Any) -> int:
    return page.locator("table.catalog tbody tr:visible").count()


@pytest.mark.browser
def test_catalog_filters_from_the_keyboard(site, tab):
    tab.goto((site / "catalog.html").as_uri())
    every = shown(tab)
    assert every >= 3
    status = tab.get_by_role("status")
    assert status.inner_text() == f"{every} of {every} cells"

    tab_to(tab, "#filter-text")
    tab.keyboard.type("m2rnn")
    assert 0 < shown(tab) < every
    assert status.inner_text() == f"{shown(tab)} of {every} cells"
    assert "text=m2rnn" in tab.url

    tab_to(tab, "form.catalog-filter button")
    tab.keyboard.press("Enter")
    assert shown(tab) == every
    assert "#" not in tab.url
    assert tab.evaluate("document.activeElement.id") == "filter-text"

    tab_to(tab, "#filter-jacStructure")
    tab.keyboard.press("ArrowDown")
    chosen = tab.locator("#filter-jacStructure").input_value()
    assert chosen
    assert 0 < shown(tab) < every
    assert f"jacStructure={chosen}" in tab.url

    # The address alone brings the same rows back.
    kept = shown(tab)
    tab.reload()
    assert tab.locator("#filter-jacStructure").input_value() == chosen
    assert shown(tab) == kept


@pytest.mark.browser
def test_catalog_leads_to_a_card(site, tab):
    tab.goto((site / "catalog.html").as_uri())
    tab.locator("table.catalog tbody a").first.click()
    tab.wait_for_url("**/cells/*.html*")
    tab.locator("h1").wait_for()


@pytest.mark.browser
def test_pages_fit_a_phone_and_stay_quiet(site, tab):
    tab.set_viewport_size(NARROW)
    for path in pages(site):
        tab.goto(path.as_uri())
        width = tab.evaluate("document.documentElement.scrollWidth")
        assert width <= NARROW["width"], f"{path.name} is {width} pixels wide"
        text = tab.locator("article").inner_text()
        assert "\\(" not in text, path.name
        assert "\\[" not in text, path.name


@pytest.mark.browser
def test_search_works_from_disk(site, tab):
    tab.goto((site / "index.html").as_uri())
    tab.keyboard.press("/")
    tab.keyboard.type("fidelity")
    tab.locator(".md-search-result__link").first.wait_for()
    assert "fidelity" in tab.locator(".md-search-result__link").first.inner_text().lower()


@pytest.mark.browser
def test_colours_can_be_changed_by_hand(site, tab):
    tab.goto((site / "index.html").as_uri())
    tab.get_by_title("Use the dark colours").click()
    assert tab.evaluate("document.body.dataset.mdColorScheme") == "slate"


@pytest.mark.browser
def test_readable_without_javascript(site, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "catalog.html").as_uri())
    assert shown(page) >= 3
    assert page.locator("table.catalog .katex").first.is_visible()
    context.close()
