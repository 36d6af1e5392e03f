"""The page in a real browser: it opens offline, is readable on a phone, in the dark and on paper, and sorts."""

import shutil

import pytest

from secateur.cli import main

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    tiny = ["--set", "train.epochs=3", "--set", "finetune.epochs=2", "--shadows", "1"]
    assert main(["audit", "--out", str(folder), "--pruner", "l1-unstructured,l1-structured", *tiny]) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("left out: there is no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, page_file):
    context = browser.new_context(offline=True)
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(page_file.as_uri())
    yield page
    assert errors == []
    context.close()


def column(page, index):
    return page.eval_on_selector_all(f"#attacks tbody td:nth-child({index})", "cells => cells.map(c => c.dataset.value)")


def test_the_verdict_comes_first_and_the_table_is_whole(page):
    assert "gives" in page.inner_text(".verdict")
    assert page.locator("#attacks tbody tr").count() == 6  # three models, two attacks
    assert page.locator("#costs tbody tr").count() == 3


def test_the_table_sorts_by_number_both_ways(page):
    heads = page.locator("#attacks th")
    auc = [heads.nth(i).inner_text() for i in range(heads.count())].index("AUC") + 1
    heads.nth(auc - 1).click()
    up = [float(x) for x in column(page, auc)]
    assert up == sorted(up)
    heads.nth(auc - 1).click()
    assert [float(x) for x in column(page, auc)] == sorted(up, reverse=True)
    assert heads.nth(auc - 1).get_attribute("aria-sort") == "descending"


def test_a_phone_does_not_scroll_sideways(page):
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_dark_mode_is_dark_and_readable(page):
    def lightness(scheme, what):
        page.emulate_media(color_scheme=scheme)
        colour = page.evaluate(f"getComputedStyle(document.body).{what}")
        return sum(int(x) for x in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3

    assert lightness("light", "backgroundColor") > 200 > 80 > lightness("light", "color")
    assert lightness("dark", "backgroundColor") < 60 < 180 < lightness("dark", "color")


def test_it_prints_within_the_page(page):
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1000, "height": 1400})
    assert page.evaluate("document.documentElement.scrollWidth") <= 1000
    assert len(page.pdf()) > 10_000
