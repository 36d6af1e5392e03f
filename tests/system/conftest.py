"""The order of files, and a real browser for the tests of pages; each of their modules has a fixture `page_file`."""

import shutil

import pytest

# Files that take over a minute, the longest first: one that began last would leave the other workers idle.
LONG = (
    "test_studies",
    "test_soak",
    "test_flower_deployed",
    "test_core_environment",
    "test_flower_first_app",
    "test_app_audit",
    "test_flower_versions",
    "test_readme",
    "test_kill_federate",
    "test_kill_audit",
)


def pytest_collection_modifyitems(items):
    """Let the long files begin first; other tests keep their order."""
    ranks = {name: rank for rank, name in enumerate(LONG)}

    def rank_of(item):
        return ranks.get(item.path.stem, len(LONG)) if item.get_closest_marker("system") else len(LONG)

    items.sort(key=rank_of)


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
