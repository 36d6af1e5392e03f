"""Takes the picture of a report's first screen that README.md shows.

    secateur audit --out runs/demo
    python docs/picture.py runs/demo/report.html docs/images/report.png

Needs playwright and Chromium. Colours are reduced to 128, so that the file stays small.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SIZE = {"width": 1180, "height": 790}


def take_picture(page: Path) -> Image.Image:
    """Return the first screen of a page."""
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_timeout(1500)  # plots are drawn after the page is loaded
        shot = tab.screenshot()
        browser.close()
    return Image.open(io.BytesIO(shot)).convert("RGB").quantize(128)


def main(arguments: list[str]) -> int:
    """Write the picture of a page to a file."""
    page, file = map(Path, arguments)
    file.parent.mkdir(parents=True, exist_ok=True)
    take_picture(page).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
