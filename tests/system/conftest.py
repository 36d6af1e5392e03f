"""A real browser for the tests of pages; each of their modules has a fixture `page_file`."""

import shutil

import pytest


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
    """The page with no network; a complaint, or a question to anything but the file, fails the test."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("request", lambda request: None if request.url.startswith("file:") else complaints.append(request.url))
    page.goto(page_file.as_uri())
    yield page
    assert complaints == []
    context.close()
