"""Use `vmonarch ui` in headless Chromium as a visitor does: `python -m vmonarch.eval.studies.page`.

It raises where the page does not do what docs/ui.md says. It needs `pip install playwright` and a Chromium; the
embedded model takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PROMPT = "a red circle moving to the right over a dark grey background"
MINUTES = 60_000


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a page of its own, whose videos are in `folder`, until the block ends."""
    command = [sys.executable, "-m", "vmonarch", "ui", "--port", "0", "--output-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.match(r"(http://\S+)", server.stdout.readline())
            assert found, "the server has not started"
            yield found[1]
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0, "Ctrl-C does not end the server"


def opened(browser: Any, url: str, width: int, asked: list[str]) -> Any:
    """The page in a window of this width."""
    page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.get_by_role("button", name="Generate").wait_for(timeout=MINUTES)
    page.wait_for_timeout(2000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the window has to scroll sideways"
    return page


def use(browser: Any, url: str, folder: Path, pictures: Path) -> None:
    """What two visitors do; screenshots of the page in a wide and a narrow window.

    Raises:
        AssertionError, playwright's errors: the page does not do what it should.
    """
    asked: list[str] = []
    first, second = opened(browser, url, 1280, asked), opened(browser, url, 390, asked)
    first.get_by_label("Prompt").first.fill(PROMPT)
    first.get_by_label("Size").fill("100×96")
    first.get_by_label("Size").press("Enter")
    first.get_by_role("button", name="Generate").click()
    first.get_by_text("nearest: 96 or 112").wait_for(timeout=MINUTES)
    first.get_by_label("Size").fill("160×96")
    first.get_by_label("Size").press("Enter")
    first.locator(".vm-die").click()
    first.get_by_role("button", name="Generate").click()
    first.get_by_text(re.compile(r"step \d+ of \d+, .* left")).first.wait_for(timeout=5 * MINUTES)
    second.get_by_label("Prompt").first.fill(PROMPT)
    for label, value in (("Steps", "4"), ("Frames", "9")):
        second.get_by_label(label).fill(value)
    second.get_by_role("button", name="Generate").click()
    second.get_by_text(re.compile(r"queue: \d+/\d+")).first.wait_for(timeout=MINUTES)
    before, begun = sorted(folder.iterdir()), time.perf_counter()
    first.get_by_role("button", name="Cancel").click()
    first.get_by_text("Cancelled.").wait_for(timeout=MINUTES)
    print(f"cancelled in {time.perf_counter() - begun:.1f} s")
    assert sorted(folder.iterdir()) == before, "a cancelled video has left files"
    second.get_by_text("Made in").wait_for(timeout=5 * MINUTES)
    first.reload()
    first.locator("video").first.wait_for(timeout=MINUTES)
    with first.expect_download() as event:
        first.get_by_role("link", name="video").first.click()
    download, ours = Path(event.value.path()), folder / event.value.suggested_filename
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (download, ours)}
    assert len(digests) == 1, "the download is another file"
    for page, name in ((first, "wide"), (second, "narrow")):
        page.evaluate("window.scrollTo(0, 0)")
        page.wait_for_timeout(1000)
        page.screenshot(path=str(pictures / f"page-{name}.png"))
    elsewhere = [address for address in asked if not address.startswith((url, "blob:", "data:"))]
    assert not elsewhere, elsewhere


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--screenshots", type=Path, default=Path("outputs"), help="folder of the pictures of the page")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its program (default: that on the path)")
    options = parser.parse_args(arguments)
    options.screenshots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, served(Path(temporary)) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        use(browser, url, Path(temporary), options.screenshots)
        browser.close()
    print("the page does what it should")


if __name__ == "__main__":
    main()
