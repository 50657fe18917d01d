"""The report in headless Chromium, from disk: it moves, keys reach it, it fits a phone, it fetches nothing.

`.ci/run` installs Chromium (apt-get install chromium); without it this is skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.report_factory import write_run
from tests.utils.test_report_page import layers_picture
from utils.report.cli import main
from utils.report.volumes import save_layers

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
NUM_CHARTS = 6  # of the run by hand, those behind the fold not counted
SEEN = "(id) => document.getElementById(id).toDataURL()"
# what the browser complains of beside exceptions, as of a ResizeObserver that goes in a circle
NOTE_ERRORS = "window.errors = []; addEventListener('error', (event) => window.errors.push(event.message));"
FOCUS = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || ''"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two runs with everything in it."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = write_run(folder / "first"), write_run(folder / "second")
    save_layers(str(first / "layers" / "row_000003.npz"), layers_picture())
    main([str(first), str(second)])
    return first / "comparison.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, file: Path, width: int = 1200, scheme: str = "light", height: int = 800
) -> Iterator[Page]:
    """The page in a window of its own; at its end nothing may have been complained of or fetched."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page, troubles = context.new_page(), []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: troubles.append(request.url) if fetched(request.url) else None)
    page.add_init_script(NOTE_ERRORS)
    page.goto(file.as_uri())
    yield page
    troubles += page.evaluate("window.errors")
    context.close()
    assert troubles == []


def fetched(url: str) -> bool:
    return not url.startswith(("file:", "data:"))


def changes(page: Page, canvas: str, action: str) -> bool:
    """Whether a canvas shows something else after an action of the keyboard or mouse."""
    before = page.evaluate(SEEN, canvas)
    kind, _, word = action.partition(" ")
    if kind == "press":
        page.keyboard.press(word)
    elif kind == "check":
        page.locator(f"#show-{word}").click()
    else:
        page.locator(f"#{canvas}").hover()
        page.mouse.wheel(0, int(word))
        page.wait_for_timeout(100)
    return page.evaluate(SEEN, canvas) != before


def wait_until_drawn(page: Page, plot: str) -> None:
    """Not wait_for_function, which the page's own policy forbids: it evaluates text inside the page."""
    for _ in range(100):
        if page.evaluate(f"Boolean(document.querySelector('{plot}')._fullLayout)"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{plot} was not drawn in 5 s")


def test_the_slice_viewer_moves(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as page:
        page.locator("#bscan").scroll_into_view_if_needed()
        assert page.locator("#bscan-text").inner_text() == "B-scan 9 of 16"
        assert changes(page, "bscan", "wheel 100")
        assert page.locator("#bscan-text").inner_text() == "B-scan 10 of 16"
        page.locator("#bscan").focus()
        assert changes(page, "bscan", "press ArrowDown")
        assert changes(page, "enface", "press Home")
        assert page.locator("#bscan-text").inner_text() == "B-scan 1 of 16"
        page.locator("#plane").focus()
        assert changes(page, "bscan", "press ArrowRight")
        for canvas, toggle in (("bscan", "masks"), ("bscan", "features"), ("enface", "features")):
            assert changes(page, canvas, f"check {toggle}")
        assert not page.locator("#show-surfaces").is_enabled()  # this volume has none
        page.locator("#volume").select_option(index=2)
        page.wait_for_timeout(200)
        assert page.locator("#bscan-text").inner_text() == "B-scan 2 of 6"
        assert changes(page, "bscan", "check surfaces")
        assert "ILM, BM" in page.locator("#keys").inner_text()


def test_a_window_that_shows_all_and_changes_complains_of_nothing(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file, height=5200) as page:
        for width in (1200, 700, 360, 1200):
            page.set_viewport_size({"width": width, "height": 5200})
            page.wait_for_timeout(300)


def test_curves_zoom_and_runs_can_be_hidden(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as page:
        plot = page.locator("#charts .plot").first
        plot.scroll_into_view_if_needed()
        wait_until_drawn(page, "#charts .plot")
        traces = "document.querySelector('#charts .plot').data.filter((trace) => trace.x[0] !== null).length"
        span = "(([a, b]) => b - a)(document.querySelector('#charts .plot')._fullLayout.xaxis.range)"
        legend, area = (
            page.locator(f"#charts {kind}").first.bounding_box() for kind in (".legend", ".nsewdrag")
        )
        assert legend is not None
        assert area is not None
        assert legend["y"] + legend["height"] <= area["y"] + 1  # its lines lie above the curves
        both, wide = page.evaluate(traces), page.evaluate(span)
        page.get_by_role("checkbox", name="second").click()
        assert page.evaluate(traces) == both / 2
        plot.focus()
        page.keyboard.press("+")
        assert page.evaluate(span) == pytest.approx(wide / 2)
        page.keyboard.press("0")
        assert page.evaluate(span) == pytest.approx(wide)
        box = plot.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 110, steps=5)
        page.mouse.up()
        page.wait_for_timeout(300)
        assert page.evaluate(span) < wide / 2


def test_the_keyboard_reaches_everything(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as page:
        reached = []
        for _ in range(80):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUS))
        wanted = {"volume", "show-masks", "show-features", "bscan", "plane", "enface"}
        assert wanted <= set(reached)
        charts = {text for text in reached if "over the optimizer step" in text}
        assert len(charts) == NUM_CHARTS


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Browser, page_file: Path, scheme: str) -> None:
    with opened(browser, page_file, width=360, scheme=scheme) as page:
        for section in page.locator("section").all():
            section.scroll_into_view_if_needed()
            page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = page.evaluate("getComputedStyle(document.body).color")
        brightness = [sum(map(int, text[4:-1].split(","))) for text in (back, ink)]
        assert (brightness[0] > brightness[1]) == (scheme == "light")
