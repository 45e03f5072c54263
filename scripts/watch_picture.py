"""Takes pictures of `dpipe watch` for the docs: python scripts/watch_picture.py RUN FOLDER.

Writes watch-light.png, watch-dark.png and watch-phone.png. Needs scripts/apt-browser and the extra
dev.
"""

import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURES = {
    "watch-light": ("light", 1180),
    "watch-dark": ("dark", 1180),
    "watch-phone": ("light", 390),
}
_HEIGHT = 800
_WAIT_MS = 60_000


def take(address: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for name, (scheme, width) in PICTURES.items():
            size = {"width": width, "height": _HEIGHT}
            page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            page.set_default_timeout(_WAIT_MS)
            page.goto(address)
            page.wait_for_selector("#lanes svg")
            page.screenshot(path=folder / f"{name}.png", full_page=True)
        browser.close()


def main(run: str, folder: str) -> None:
    command = [sys.executable, "-m", "dpipe", "watch", run, "--bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            address = serving.stdout.readline().split()[1]
            take(address, Path(folder))
        finally:
            serving.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
