"""The page in a real browser: it loads, its figures move under load, a drawn digit is read, a slider acts."""

from __future__ import annotations

import re
import shutil
import threading

import numpy as np
import pytest
from support.callers import until
from support.documents import ROOT
from support.libraries import REQUIRED, need
from support.serving import need_server, serving

import weft

need_server()

FILES = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css", "/favicon.ico": "image/svg+xml"}


@pytest.fixture(scope="module")
def served():
    need("sklearn")
    from weft.serve.load import Target

    (digits,) = Target(str(ROOT / "examples" / "digits.py")).models()
    other = weft.serve.model(lambda text: [item.upper() for item in text], name="upper", example={"text": ["a"]})

    def count(x):
        yield from (x, x + 1, x + 2)

    streaming = weft.serve.model(count, example={"x": np.zeros((1, 2), np.int32)})
    with serving(digits, other, streaming, weft.serve.model(lambda x: x, name="bare")) as server:
        yield server


def test_its_files(served):
    for path, kind in FILES.items():
        status, text, headers = served.ask("GET", path)
        assert status == 200
        assert headers.get_content_type() == kind
        assert "default-src 'none'" in headers["content-security-policy"]
        assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", text)  # it works offline


def recent(served, after=0):
    """The batches of each model since one; a batch is seen shortly after its callers have their answers."""
    models = served.ask("GET", f"/ui/state?after={after}")[1]["models"]
    return {name: seen["recent"] for name, seen in models.items()}


def test_batchers_of_one_name():
    def policy(x):
        return x

    one, two = weft.batched(policy), weft.batched(policy)
    with serving(weft.serve.model(one, name="one"), weft.serve.model(two, name="two")) as served:
        served.ask("GET", "/ui/state")
        one(np.zeros((3, 2)))
        two(np.zeros((1, 2)))
        until(lambda: all(recent(served).values()))
        assert {name: [batch["rows"] for batch in seen] for name, seen in recent(served).items()} == {
            "one": [[3]],
            "two": [[1]],
        }


def test_its_data(served):
    served.ask("GET", "/ui/state")  # batches are collected from now on
    with weft.Client(served.url) as client:
        client.infer("digits", pixels=np.zeros((3, 64), np.float32))
    until(lambda: recent(served)["digits"])
    (batch,) = recent(served)["digits"]
    assert (batch["rows"], batch["size"], batch["calls"], batch["padding"]) == ([3], 3, 1, 0)
    state = served.ask("GET", f"/ui/state?after={batch['id']}")[1]["models"]["digits"]
    assert state["recent"] == []
    assert state["fit"]["per_batch"] >= 0
    assert recent(served, after=batch["id"] + 1)["digits"] == [batch]  # the id is of another process
    assert served.ask("GET", "/ui/state?after=x")[0] == 400


def test_nobody_looks_nothing_is_collected(served):
    scope = served.app.models["digits"].version.policy._scope
    served.ask("GET", "/ui/state")
    assert served.app.watch in scope.observers
    served.app.watch.rest(at_once=True)
    assert served.app.watch not in scope.observers


def test_the_fit_of_run_times():
    from weft.serve.watch import fit_runs

    per_row, per_batch = fit_runs([(n, 1e-3 + 1e-4 * n) for n in (1, 5, 20, 64) for _ in range(5)] + [(5, 1.0)])
    assert per_row == pytest.approx(1e-4, rel=1e-6)
    assert per_batch == pytest.approx(1e-3, rel=1e-6)
    assert fit_runs([]) is None
    assert fit_runs([(4, 0.2)]) == (0.0, 0.2)
    assert fit_runs([(1, 0.0), (10, 1.0)])[1] == 0.0


@pytest.fixture(scope="module")
def browser():
    need("playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        if "playwright" in REQUIRED:
            pytest.fail("chromium is required here and not installed")
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
class TestInChromium:
    @pytest.fixture
    def page(self, served, browser):
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(served.url)
        page.get_by_text("digits version 1 is ready").wait_for()
        yield page
        assert problems == []
        page.close()

    def test_figures_move_under_load(self, served, page):
        stop = threading.Event()

        def ask():
            with weft.Client(served.url) as client:
                while not stop.is_set():
                    client.infer("digits", pixels=np.zeros((2, 64), np.float32))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            page.locator("#batches .bar").nth(5).wait_for()
            rate = page.locator("#tiles dd").first
            until(lambda: re.match(r"[\d,]{2}", rate.inner_text()), 20)
            path = page.locator("#charts path:not(.area)").first
            until(lambda: "L" in (path.get_attribute("d") or ""), 20)
            before = path.get_attribute("d")
            until(lambda: path.get_attribute("d") != before, 20)
            page.locator("#batches").focus()
            page.keyboard.press("ArrowLeft")
            assert "closed because" in page.locator("#batch").inner_text()
            assert page.locator("#hold").get_attribute("aria-pressed") == "true"
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)

    def test_a_drawn_digit_is_read(self, page):
        canvas = page.locator("#canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        three = [
            (0.3, 0.25),
            (0.5, 0.15),
            (0.7, 0.25),
            (0.65, 0.42),
            (0.5, 0.48),
            (0.68, 0.55),
            (0.72, 0.72),
            (0.5, 0.85),
            (0.28, 0.75),
        ]
        for i, (x, y) in enumerate(three):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"], steps=4)
            if i == 0:
                page.mouse.down()
        page.mouse.up()
        page.locator("#digit", has_text=re.compile(r"^3 ")).wait_for()

    def test_keys_draw(self, page):
        page.locator("#canvas").focus()
        for _ in range(6):
            page.keyboard.press(" ")
            page.keyboard.press("ArrowDown")
        page.locator("#digit", has_text=re.compile(r"^\d ")).wait_for()
        page.keyboard.press("Delete")
        until(lambda: page.locator("#digit").inner_text() == "")

    def test_a_slider_acts_at_once(self, served, page):
        options = served.app.models["digits"].version.policy
        page.locator("#size").focus()
        page.keyboard.press("ArrowLeft")
        until(lambda: options.options.max_batch_size == 32)
        page.locator("#wait").focus()
        page.keyboard.press("ArrowRight")
        until(lambda: options.options.max_wait == 0.0002)
        page.locator("#tuned", has_text="32 rows").wait_for()

    def test_another_model_has_a_form(self, page):
        page.get_by_role("button", name="upper").click()
        page.locator("#in-text").fill("one\ntwo")
        page.get_by_role("button", name="Send").click()
        page.locator("#answer", has_text='["ONE","TWO"]').wait_for()

    def test_another_model_shows_its_own_batches(self, served, page):
        served.infer("digits", pixels=np.zeros((3, 64), np.float32))
        page.locator("#batch", has_text="1 call, 3 rows").wait_for()
        page.locator("#batches .bar").last.click()
        page.get_by_role("button", name="bare").click()
        page.get_by_text("No batch has run since this page was opened").wait_for()
        assert page.locator("#batch").inner_text() == ""
        assert page.locator("#hold").get_attribute("aria-pressed") == "false"

    def test_a_model_without_an_example_has_a_form_after_a_call(self, served, page):
        page.get_by_role("button", name="bare").click()
        page.get_by_text("known after the first call").wait_for()
        assert not page.get_by_role("button", name="Send").is_visible()
        served.infer("bare", x=np.zeros((1, 2)))
        page.locator("#in-x").wait_for()
        assert not page.get_by_text("known after the first call").is_visible()

    def test_the_answers_of_a_model_that_streams(self, page):
        page.get_by_role("button", name="count").click()
        page.locator("#in-x").fill("[3, 4]")
        page.get_by_role("button", name="Send").click()
        page.locator("#answer", has_text="[5,6]").wait_for()
        assert page.locator("#answer").inner_text().count("INT32") == 3

    def test_every_control_has_a_name(self, page):
        for role in ("button", "slider", "img", "textbox"):
            for element in page.get_by_role(role).all():
                assert element.get_attribute("aria-label") or element.inner_text() or page.evaluate(
                    "(e) => e.labels && e.labels.length > 0", element.element_handle()
                )  # fmt: skip
