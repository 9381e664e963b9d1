"""The documentation as people see it: in a browser, at the widths of a screen and of a telephone.

`make docs` builds the pages; Chromium opens each of them in a frame and reports what sticks out of
it and which images have no text. Skipped where either is missing.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
WIDTHS = (1280, 390)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the pages of make docs"),
]

# An element may be wider than the page if something around it can be scrolled.
HARNESS = """<!doctype html><html><body><script id="found" type="application/json"></script>
<script>
const pages = PAGES, widths = WIDTHS, found = [];
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

async function open(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  const loaded = new Promise((done) => (frame.onload = done));
  document.body.append(frame);
  await loaded;
  return frame;
}

function scrolls(element, view) {
  for (let up = element; up; up = up.parentElement)
    if (["auto", "scroll", "hidden"].includes(view.getComputedStyle(up).overflowX)) return true;
  return false;
}

async function look(page, width) {
  const frame = await open(page, width);
  const inner = frame.contentDocument;
  for (const element of inner.querySelectorAll("article *")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(element, frame.contentWindow))
      found.push([page, width, `${element.tagName} is ${Math.round(box.right)} pixels wide`]);
  }
  for (const image of inner.querySelectorAll("article img")) {
    if (!image.alt.trim()) found.push([page, width, `${image.src} has no text`]);
    if (image.complete && !image.naturalWidth) found.push([page, width, `${image.src} is missing`]);
  }
  frame.remove();
}

async function search(page, words) {
  const frame = await open(page, widths[0]);
  const inner = frame.contentDocument, view = frame.contentWindow;
  await wait(500);
  inner.querySelector("#__search").click();
  const query = inner.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = words;
  query.dispatchEvent(new view.KeyboardEvent("keyup", { bubbles: true }));
  for (let tries = 0; tries < 40; tries++) {
    await wait(250);
    if (inner.querySelector(".md-search-result__item")) return;
  }
  found.push([page, widths[0], `searching for "${words}" found nothing`]);
}

(async () => {
  for (const width of widths) for (const page of pages) await look(page, width);
  await search(pages[0], "marginal likelihood");
  found.push(["looked at", widths.length, String(pages.length)]);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script></body></html>
"""


def look_at(folder: Path, pages: list[Path]) -> list[list[object]]:
    """What is wrong with some pages, as Chromium sees them."""
    harness = folder / "harness.html"
    # The page that is searched in is the first one.
    addresses = json.dumps([page.resolve().as_uri() for page in pages])
    harness.write_text(HARNESS.replace("PAGES", addresses).replace("WIDTHS", json.dumps(WIDTHS)))
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",  # needed by root, in containers
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=120000",
        "--dump-dom",
        harness.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    answer = re.search(r'<script id="found"[^>]*>(.*?)</script>', done.stdout, re.S)
    assert answer is not None
    assert answer.group(1), "Chromium did not get through all pages"
    found: list[list[object]] = json.loads(unescape(answer.group(1)))
    assert found.pop() == ["looked at", len(WIDTHS), str(len(pages))]
    return found


def test_nothing_sticks_out_of_a_page_every_image_has_a_text_and_search_works(
    tmp_path: Path,
) -> None:
    pages = sorted(page for page in SITE.rglob("*.html") if page.name != "404.html")
    pages.sort(key=lambda page: page != SITE / "index.html")
    assert len(pages) > 20
    assert look_at(tmp_path, pages) == []


def test_a_page_that_is_too_wide_or_has_an_image_without_text_is_found(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><html><body><input id='__search' type='checkbox'>"
        "<input data-md-component='search-query'><article><div style='width:2000px'>wide</div>"
        "<img src='none.png'></article></body></html>"
    )
    found = [str(line[2]) for line in look_at(tmp_path, [page])]
    assert sum("pixels wide" in line for line in found) == len(WIDTHS)
    assert any("has no text" in line for line in found)
    assert any("is missing" in line for line in found)
    assert any("found nothing" in line for line in found)
