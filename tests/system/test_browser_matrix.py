"""The page of the matrix in a real browser: a cell opens its rows, and nothing is cut off in a narrow window."""

import pytest
from browsing import cut_off, lightness, overlong

from secateur.cli import main

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    parts = ["--set", "rows=none,dgp,ppb", "--set", "measures=inversion,active"]
    assert main(["reproduce", "matrix", "--scale", "tiny", "--seeds", "1", "--out", str(folder), *parts]) == 0
    return folder / "report.html"


def test_a_cell_opens_its_rows_and_pictures(page):
    details = page.locator("#digits-cnn-dgp")
    assert details.get_attribute("open") is None
    page.locator('a[href="#digits-cnn-dgp--strongest"]').click()
    assert details.get_attribute("open") is not None
    assert page.locator("#digits-cnn-dgp--strongest").is_visible()
    widths = details.locator("img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert len(widths) >= 12 and set(widths) == {8}, "truths, inversions and the active server's pictures"


def test_a_refused_cell_is_hatched_and_says_why(page):
    cell = page.locator("td.refused").first
    assert "clients train without it" in cell.get_attribute("title")
    assert "gradient" in cell.evaluate("node => getComputedStyle(node).backgroundImage")


@pytest.mark.parametrize("width", [320, 390, 700, 1000, 1400])
def test_nothing_is_cut_off_at_any_width(page, width):
    assert cut_off(page, width) == []
    assert overlong(page) == []


def test_colours_stay_in_the_dark_and_the_page_is_dark(page):
    page.emulate_media(color_scheme="dark")
    assert lightness(page, "body", "backgroundColor") < 60
    assert lightness(page, ".shade0", "backgroundColor") > 200 > 100 > lightness(page, ".shade0", "color")
