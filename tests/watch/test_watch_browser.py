"""The page in a real browser: Debian's chromium, driven by Playwright. scripts/apt-browser installs
it.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from run_folders import append, row, write_config

from dpipe.watch.broadcast import Broadcast
from dpipe.watch.command import _listen
from dpipe.watch.folder import RunFolder
from dpipe.watch.report import write_report
from dpipe.watch.server import PageServer

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("DPIPE_NO_BROWSER"):
            pytest.skip("no chromium, and DPIPE_NO_BROWSER is set")
        pytest.fail(
            "these tests need Debian's chromium: run scripts/apt-browser as root, or set "
            "DPIPE_NO_BROWSER=1 to leave them out"
        )
    # As root chromium has no sandbox; it opens nothing here but this page.
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=WAIT_MS
        )
        yield launched
        launched.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_config(folder)
    append(folder, row(0), {"step": 0, "held_out_loss": 5.0}, row(1))
    return folder


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    source = RunFolder(folder)
    listening = _listen("127.0.0.1", 0)
    server = PageServer(Broadcast(source, 0.05), None, 0.05)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(30)
    source.close()


class Opened:
    """A page, what it said on its console, and what it asked for."""

    def __init__(
        self, browser: Browser, address: str, scheme: str, width: int, drawn: str = "#lanes svg"
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector(drawn)


def test_page_loads_follows_the_run_and_asks_nobody_else(
    browser: Browser, address: str, folder: Path
) -> None:
    opened = Opened(browser, address, "light", 1180)
    page = opened.page
    text = page.inner_text("body")
    assert "2 of 10 steps" in text
    assert "oslo" in text and "layers 0–2" in text and "100 Mbit/s · 20 ms" in text
    assert page.locator("#loss canvas").count() == 1

    hostile = "<img src=x onerror=alert(1)>"
    with (folder / "logs" / "rank-0.log").open("w") as log:
        log.write(f"2026-11-23 18:00:20,679 rank 0 lost {hostile}\n")
    rates = {"0->1": 1.0, f"0->{hostile}": 2.0}
    append(folder, row(2, loss=1.25, mb_per_s=rates, relayed=list(rates)))
    page.get_by_text("3 of 10 steps").wait_for()
    page.locator("#events").get_by_text(hostile).wait_for()
    assert "1.25" in page.inner_text("#figures")
    assert hostile in page.inner_text("#events")
    assert f"{hostile} (relayed)" in page.inner_text("#map")
    assert "relayed" in page.inner_text(".hop")
    assert page.locator("main img").count() == 0

    page.focus("#loss")
    page.keyboard.press("Home")
    assert "step 0" in page.inner_text("#loss-readout")
    page.focus("#over input:checked")
    page.keyboard.press("ArrowRight")
    assert page.locator("#over input:checked").get_attribute("value") == "elapsed_s"

    assert opened.said == []
    assert all(asked.startswith(address) for asked in opened.asked), opened.asked
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_keeps_its_contrast(
    browser: Browser, address: str, scheme: str
) -> None:
    opened = Opened(browser, address, scheme, 360)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("ink", "muted", "bad"):
        for ground in ("ground", "card"):
            assert contrast(opened.page, name, ground) >= 4.5, (name, ground)
    landmarks = opened.page.locator("section, [role=region]").all()
    names = [
        landmark.aria_snapshot().splitlines()[0] for landmark in landmarks if landmark.is_visible()
    ]
    assert len(names) == len(set(names)) > 3, names
    # Every graphic has a name for who does not see it.
    for graphic in opened.page.locator("[role=img], [role=progressbar]").all():
        assert graphic.get_attribute("aria-label")
    assert opened.said == []
    opened.context.close()


def contrast(page: Page, name: str, ground: str) -> float:
    """The ratio of WCAG 2.2, which asks 4.5 for text."""
    shades = sorted(luminance(page.evaluate(f"cssColour({each!r})")) for each in (name, ground))
    return (shades[1] + 0.05) / (shades[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part, 16) / 255 for part in re.findall("..", colour.removeprefix("#"))]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_reports_draw_from_a_file_alone(browser: Browser, folder: Path, tmp_path: Path) -> None:
    one = write_report([str(folder)], None)
    both = write_report([str(folder), str(folder)], str(tmp_path / "both.html"))
    for path, drawn in ((one, "#lanes svg"), (both, "#table td")):
        opened = Opened(browser, path.as_uri(), "light", 1180, drawn)
        assert opened.page.locator("#loss canvas").count() == 1
        assert opened.said == []
        assert opened.asked == [path.as_uri()]
        opened.context.close()


def test_table_of_compared_runs_keeps_its_words_on_a_phone(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """It was as wide as the phone, and broke each number after two digits."""
    both = write_report([str(folder), str(folder)], str(tmp_path / "both.html"))
    opened = Opened(browser, both.as_uri(), "light", 390, "#table td")
    heights = [cell.bounding_box()["height"] for cell in opened.page.locator("#table td").all()]
    assert max(heights) < 40
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.context.close()
