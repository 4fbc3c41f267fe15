"""Use `vmonarch ui` in headless Chromium as a visitor does: `python -m vmonarch.eval.studies.page`.

Every check raises where the page does not do what docs/ui.md says. It needs `pip install playwright` and a Chromium;
the embedded model takes some minutes on two cores.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
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
from urllib.parse import urlsplit

from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "a red circle moving to the right over a dark grey background"
MINUTES = 60_000
# What a request for each must not be answered with: files of this machine, and of ours outside the output folder.
PRIVATE = (
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/file=http://127.0.0.1:22/",
    f"/gradio_api/file={ROOT}/pyproject.toml",
    f"/gradio_api/file={ROOT}/pipelines/embedded/model_index.json",
    "/gradio_api/file/etc/passwd",
    "/gradio_api/proxy=http://127.0.0.1:22/",
    "/outputs/../../../../../../../../etc/passwd",
    "/outputs/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "/outputs//etc/passwd",
    "/outputs/link",
    "/static/../../../../../../../../../etc/passwd",
    "/assets/%2e%2e/%2e%2e/%2e%2e/__init__.py",
)


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
            assert server.wait(timeout=60) in (0, 130), "Ctrl-C does not end the server"


def status(url: str, path: str, headers: dict[str, str] | None = None) -> int:
    """What a request for exactly this path is answered with; clients would resolve `..` themselves."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request("GET", path, headers=headers or {})
    return connection.getresponse().status


def field(page: Any, label: str) -> Any:
    """A text field, whatever is said at it."""
    return page.get_by_role("textbox", name=re.compile(f"^{label}"))


def said_at(page: Any, label: str) -> str:
    """What stands in red at a field once the page has looked at it."""
    title = f"//*[@data-testid='block-info'][starts-with(normalize-space(), '{label}')]"
    block = "/ancestor::*[contains(concat(' ', @class, ' '), ' block ')][1]"
    message = page.locator(f"xpath={title}{block}//div[contains(@class, 'validation-error')]")
    message.wait_for(timeout=MINUTES)
    return str(message.inner_text())


def fill(page: Any, **values: str) -> None:
    """Type into fields by their labels."""
    for label, value in values.items():
        field(page, label).fill(value)


def start(page: Any) -> None:
    page.get_by_role("button", name="Generate").click()


def bad_input(page: Any) -> dict[str, str]:
    """What the page says at each field to input that it cannot use."""
    found = {}
    for label, bad, good in (
        ("Prompt", "", PROMPT),
        ("Seed", "9223372036854775808", "0"),
        ("Steps", "0", ""),
        ("Width", "100", ""),
        ("Guidance", "much", ""),
    ):
        fill(page, **{label: bad})
        start(page)
        found[label] = said_at(page, label)
        fill(page, **{label: good})
    model = page.get_by_label("Model")
    model.fill("/no/such/folder")
    model.press("Enter")
    start(page)
    found["Model"] = said_at(page, "Model")
    model.fill("embedded")
    model.press("Enter")
    return found


def use(browser: Any, url: str, folder: Path, screenshot: Path) -> dict[str, Any]:
    """What two visitors find.

    Raises:
        AssertionError, playwright's errors: the page does not do what it should.
    """
    asked: list[str] = []
    first, second = (browser.new_context(viewport={"width": 1400, "height": 900}).new_page() for _ in range(2))
    for page in (first, second):
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        page.get_by_role("button", name="Generate").wait_for(timeout=MINUTES)
        page.get_by_text("Advanced").click()
    found: dict[str, Any] = {"said_at_the_field": bad_input(first)}

    start(first)
    left = first.get_by_text(re.compile(r"step \d+ of \d+, .* left")).first
    left.wait_for(timeout=5 * MINUTES)
    found["progress"] = left.inner_text()
    fill(second, Prompt=PROMPT, Steps="2", Width="96", Height="64", Frames="9")
    start(second)
    queue = second.get_by_text(re.compile(r"queue: \d+/\d+")).first
    queue.wait_for(timeout=MINUTES)
    found["second_visitor_waits"] = re.search(r"queue: \d+/\d+", queue.inner_text())[0]  # type: ignore[index]
    first.locator(".vm-table").wait_for(timeout=15 * MINUTES)
    first.wait_for_timeout(1500)
    found["table"] = [row.split("\t") for row in first.locator(".vm-table").inner_text().splitlines()]
    players = first.evaluate("[...document.querySelectorAll('video')].map(v => [v.readyState, v.currentTime])")
    assert len(players) == 2 and all(ready >= 3 and time > 0 for ready, time in players), players
    assert abs(players[0][1] - players[1][1]) < 0.2, f"the videos are not in step: {players}"
    found["videos_play"] = players
    with first.expect_download() as event:
        first.get_by_role("link", name="video").first.click()
    name = event.value.suggested_filename
    assert digest(Path(event.value.path())) == digest(folder / name), "the download is another file"
    found["downloaded"] = name
    first.get_by_text("Advanced").click()
    first.evaluate("window.scrollTo(0, 0)")
    first.wait_for_timeout(1000)
    first.screenshot(path=str(screenshot))
    second.locator(".vm-table").wait_for(timeout=5 * MINUTES)
    second.set_viewport_size({"width": 420, "height": 900})
    assert second.evaluate("document.documentElement.scrollWidth") <= 420, "a narrow window has to scroll sideways"

    before = files(folder)
    start(first)
    first.get_by_text(re.compile(r"step 2 of")).first.wait_for(timeout=5 * MINUTES)
    begun = time.perf_counter()
    first.get_by_role("button", name="Cancel").click()
    first.get_by_text("Cancelled.").wait_for(timeout=MINUTES)
    start(second)
    second.get_by_text(re.compile(r"step 1 of")).first.wait_for(timeout=5 * MINUTES)
    found["seconds_from_cancel_to_the_next_visitors_video"] = round(time.perf_counter() - begun, 1)
    assert files(folder) == before, "a cancelled video has left files"
    second.locator(".vm-table").wait_for(timeout=5 * MINUTES)
    elsewhere = [address for address in asked if not address.startswith((url, "blob:", "data:"))]
    assert not elsewhere, elsewhere
    return {**found, "requests_elsewhere": elsewhere}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def study(chromium: str, screenshot: Path) -> dict[str, Any]:
    """Serve the page, use it, ask for what is private, and make a video again from its record."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "videos"
        with served(folder) as url, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            found = use(browser, url, folder, screenshot)
            (folder / "link").symlink_to("/etc/passwd")
            answers = {path.replace(str(ROOT), "CHECKOUT"): status(url, path) for path in PRIVATE}
            answers["/ as another site's name"] = status(url, "/", {"Host": "example.com"})
            assert min(answers.values()) >= 400, answers
            found["refused"] = answers
            browser.close()
        # The second visitor's, which is small.
        record = max(folder.glob("*.json"))
        again = [sys.executable, "-m", "vmonarch", "generate", "--quiet", "--from-json", str(record)]
        result = subprocess.run(again, capture_output=True, text=True, check=True)
        assert "bit-identical" in result.stderr, result.stderr
        found["made_again_from_its_record"] = "bit-identical"
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = script_parser("studies.page", __doc__, whole=True)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks" / "page.json")
    parser.add_argument("--screenshot", type=Path, default=ROOT / "docs" / "images" / "ui.png")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="its program (default: that on the path)")
    options = parser.parse_args(arguments)
    record = script_record("studies.page", arguments, "cpu")
    write_json(options.output, {**record, **study(options.chromium, options.screenshot)})
    print(json.dumps(json.loads(options.output.read_text()), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
