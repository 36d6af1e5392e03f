"""The page of attacks on updates in a real browser: the gallery, enlarged, on a phone, in the dark, without images."""

import pytest
from browsing import cut_off, lightness, overlong

from secateur.cli import main

pytestmark = pytest.mark.system

QUICK = ["--targets", "4", "--attack", "ig:iterations=60,dlg:iterations=8", "--batch-size", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    assert main(["invert", "--out", str(folder), *QUICK]) == 0
    return folder


@pytest.fixture(scope="module")
def page_file(folder):
    return folder / "report.html"


@pytest.fixture(scope="module")
def federation_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation") / "run"
    sizes = ["--clients", "4", "--per-round", "2", "--rounds", "2", "--batch-size", "4", "--local-steps", "1"]
    attack = ["--attack", "sgi", "--iterations", "5", "--base-pruning", "snip", "--defense", "none,pseudo-largest"]
    assert main(["federate", "--data", "digits", "--model", "digits-cnn", *sizes, *attack, "--out", str(folder)]) == 0
    return folder / "report.html"


def test_the_gallery_is_drawn_and_the_worst_case_comes_first(page):
    assert page.locator(".card").count() == 8 and page.locator(".card .truth").count() == 8
    assert page.locator(".card .guess").count() == 16
    widths = page.eval_on_selector_all(".card img", "images => images.map(image => image.naturalWidth)")
    assert widths == [8] * 24  # every picture was decoded
    text = page.eval_on_selector_all(".card", "cards => cards.map(card => card.innerText)")
    psnr = [max(float(line.split()[1]) for line in card.splitlines() if line.startswith("PSNR")) for card in text]
    assert psnr == sorted(psnr, reverse=True)
    assert "training pictures" in page.inner_text(".warning")
    assert page.locator("header .warning").bounding_box()["y"] < page.locator(".verdict").first.bounding_box()["y"]


def test_a_picture_is_enlarged_beside_its_truth_and_closed_again(page):
    guess, dialog = page.locator(".card .guess .picture").nth(3), page.locator("#enlarged")
    small = guess.bounding_box()["width"]
    guess.click()
    assert dialog.is_visible() and dialog.locator("figure").count() == 2
    assert dialog.locator(".guess img").bounding_box()["width"] > 2 * small
    assert "PSNR" in dialog.inner_text()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.locator(".card .truth .picture").first.focus()
    page.keyboard.press("Enter")
    assert dialog.is_visible() and dialog.locator("figure").count() == 1
    dialog.locator(".close").click()
    assert not dialog.is_visible()


def test_the_loss_of_each_attack_is_drawn_and_told(page):
    assert page.locator("#losses .scatterlayer .js-line").count() == 4
    page.select_option("#choose-losses", label="dlg:iterations=8")
    assert page.inner_text("#losses figcaption") == "dlg:iterations=8"
    assert "loss" in page.locator("#losses .plot").get_attribute("aria-label")


def test_the_table_has_a_line_an_attack_and_sorts(page):
    assert page.locator("#recovered tbody tr").count() == 2
    page.locator("#recovered th [role=button]").nth(2).click()
    values = page.eval_on_selector_all("#recovered td:nth-child(3)", "cells => cells.map(c => Number(c.dataset.value))")
    assert values == sorted(values)
    assert page.locator("#threats dt").count() == 2


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_does_not_scroll_sideways(page, width):
    page.set_viewport_size({"width": width, "height": 740})
    page.reload()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert overlong(page) == []
    page.locator(".card .guess .picture").first.click()
    box = page.locator("#enlarged").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


@pytest.mark.parametrize("width", [320, 390, 1200, 1400, 1920])
def test_no_column_is_cut_off(page, width):
    assert cut_off(page, width) == []
    assert page.locator('#recovered td[data-heading="recognisable"]').first.is_visible()


@pytest.mark.parametrize("width", [320, 390, 1200, 1400, 1920])
def test_no_column_of_a_federation_is_cut_off(browser, federation_file, width):
    page = browser.new_page()
    page.goto(federation_file.as_uri())
    assert cut_off(page, width) == [] and overlong(page) == []
    assert page.locator('#federated td[data-heading="test accuracy"]').first.is_visible()
    page.close()


def test_dark_mode_is_dark_and_readable(page):
    for scheme, ink, paper in (("light", (0, 100), (200, 255)), ("dark", (150, 255), (0, 60))):
        page.emulate_media(color_scheme=scheme)
        assert paper[0] <= lightness(page, "body", "backgroundColor") <= paper[1]
        for text in (".card h3", ".card figcaption", ".card small", ".warning"):
            assert ink[0] <= lightness(page, text, "color") <= ink[1], (scheme, text)
        page.locator(".card .picture").first.click()
        assert paper[0] <= lightness(page, "#enlarged", "backgroundColor") <= paper[1]
        page.keyboard.press("Escape")


def test_it_prints_within_the_paper(page):
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 700, "height": 1000})  # A4 less its margins
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert overlong(page) == []


def test_without_images_there_are_scores_and_no_pictures(browser, tmp_path):
    assert main(["invert", "--out", str(tmp_path / "run"), *QUICK, "--no-images"]) == 0
    page = browser.new_page()
    page.goto((tmp_path / "run" / "report.html").as_uri())
    assert page.locator("img").count() == page.locator(".warning").count() == 0
    assert page.locator(".card").count() == 8 and "Pictures were left out" in page.inner_text("#gallery")
    page.close()
