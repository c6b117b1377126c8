"""Every page in a real browser: no console error, nothing wider than the window, light and dark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.group_runs import write_group_run
from tests.look_runs import PROMPT, write_run
from tests.simulation.test_sim_cluster import config
from tests.unit.observe_events import pulled, step

from millrace.observe.sinks.jsonl import EventLog, MetricsLog
from millrace_sim.compare import compare, schedules
from millrace_sim.setup import scenario
from millrace_ui.overview import Overview
from millrace_ui.run_report import write_report
from millrace_ui.simulated import simulated

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-ui installs playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
"""None: the one that Playwright has, if it has one."""

WAIT_MS = 120_000
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
VIEWS = {
    "runs": "",
    "run": "run/a",
    "run by tokens": "run/a?by=tokens",
    "samples": "samples/a?choice=best",
    "search": "samples/a?text=alert",
    "filtered": "samples/a?reward_min=0.5&tokens_max=9&state=trained&color=version",
    "group": "group/g?id=8&color=advantage",
    "trajectory": "samples/g?trajectory=32&color=advantage",
    "no group": "group/g?id=99",
    "config": "config/a",
    "curves": "curves/a?smooth=0.9&by=tokens",
    "logarithmic": "curves/a?metric=logprob_gap%2F0%2Fmean&log=1&from=3&to=20",
    "groups": "compare?run=a&run=b&run=g&group=seed&band=deviation&smooth=0.5",
    "speed": "speed/a",
    "grouped": "?group=seed&sort=reward&find=-stopped",
    "compare": "compare?run=a&run=b&by=time",
    "gone": "run/gone",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    made = [Overview(name, write_run(root / name, steps=40)) for name in ("a", "b")]
    write_report(made, root / "report.html")
    write_group_run(root / "g")
    base = scenario(config(steps=3))
    page_text = simulated(
        "one", base, compare(base, schedules(["synchronous", "areal"]), seeds=2), [("areal", "1 ± 2")]
    )
    (root / "simulated.html").write_text(page_text)
    return root


@pytest.fixture(scope="module")
def ui(runs: Path) -> Iterator[str]:
    """The address that the command prints."""
    command = [sys.executable, "-m", "millrace", "ui", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        if CHROMIUM is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("no chromium: install it, or name one in CHROMIUM")
        arguments = ["--no-sandbox", "--disable-gpu"]
        made = started.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=WAIT_MS)
        yield made
        made.close()


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A page that was drawn, and in the end has said nothing wrong."""
    wrong: list[str] = []
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert not wrong


def assert_fits_everywhere(page: Any) -> None:
    """No wider than any window, and with the colours that the reader asks for."""
    for width, scheme in product(WIDTHS, SCHEMES):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"() => document.documentElement.scrollWidth <= {width}")
        colors = (f"getComputedStyle(document.body).{what}" for what in ("backgroundColor", "color"))
        paper, ink = (brightness(page.evaluate(color)) for color in colors)
        assert (paper > ink) == (scheme == "light")


def main_text(page: Any) -> str:
    return str(page.inner_text("main"))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_every_window_and_says_nothing_wrong(ui: str, browser: Any, view: str) -> None:
    with opened(browser, ui + VIEWS[view]) as page:
        assert_fits_everywhere(page)


@pytest.mark.parametrize(
    ("name", "heading"), [("report", "2 runs compared"), ("simulated", "Timeline of areal")]
)
def test_a_file_needs_no_network(runs: Path, browser: Any, name: str, heading: str) -> None:
    with opened(browser, (runs / f"{name}.html").as_uri()) as page:
        assert_fits_everywhere(page)
        assert heading in main_text(page)
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0


def test_the_run_page_goes_on_while_the_run_does(ui: str, runs: Path, browser: Any) -> None:
    with opened(browser, f"{ui}run/a") as page:
        page.wait_for_selector("#chart-reward svg[data-x='1.0 40.0']")
        log = MetricsLog(runs / "a" / "metrics.jsonl")
        log(step(500.0, 41, reward_mean=0.875))
        log.close()
        page.wait_for_selector("#chart-reward svg[data-x='1.0 41.0'][aria-label$='to 0.875']")


def test_a_role_that_comes_later_gets_its_row(ui: str, runs: Path, browser: Any) -> None:
    with opened(browser, f"{ui}run/b") as page:
        log = EventLog(runs / "b" / "events.jsonl")
        log(pulled(500.0, "replica-7"))
        log.close()
        page.wait_for_selector("#lanes .lane b:has-text('replica-7')")


def test_a_timeline_is_zoomed_without_a_script_and_tells_what_a_bar_is(ui: str, browser: Any) -> None:
    page = browser.new_page(java_script_enabled=False, viewport={"width": 1280, "height": 900})
    page.goto(f"{ui}run/b")
    lane, place = page.locator("#lanes .lane").first, page.locator("#lanes")
    wide = lane.bounding_box()["width"]
    assert wide == pytest.approx(place.bounding_box()["width"], abs=1)
    assert [page.locator(f"#lanes .z{zoom}").is_visible() for zoom in (1, 8)] == [True, False]
    page.select_option(".chart:has(#lanes) select", "8")
    assert lane.bounding_box()["width"] == pytest.approx(8 * wide, rel=0.01)
    assert [page.locator(f"#lanes .z{zoom}").is_visible() for zoom in (1, 8)] == [False, True]
    assert page.get_attribute("#lanes .lane i", "title").startswith("step 1, from ")
    page.close()


def test_a_live_timeline_keeps_its_zoom(ui: str, runs: Path, browser: Any) -> None:
    with opened(browser, f"{ui}run/b") as page:
        page.select_option(".chart:has(#lanes) select", "64")
        log = EventLog(runs / "b" / "events.jsonl")
        log(pulled(501.0, "replica-8"))
        log.close()
        page.wait_for_selector("#lanes .lane b:has-text('replica-8')")
        assert page.locator("#lanes .z64").is_visible()


def test_a_page_that_told_of_a_trouble_becomes_whole_by_itself(ui: str, runs: Path, browser: Any) -> None:
    with opened(browser, f"{ui}run/later") as page:
        assert "there is no run later" in main_text(page)
        write_run(runs / "later")
        page.wait_for_function("() => document.getElementById('facts')")


@pytest.mark.smoke
def test_what_a_run_wrote_is_text(ui: str, browser: Any) -> None:
    with opened(browser, f"{ui}samples/a") as page:
        assert PROMPT in main_text(page)
        assert page.evaluate("document.querySelectorAll('main article script').length") == 0


def test_tokens_change_their_colour(ui: str, browser: Any) -> None:
    color = "getComputedStyle(document.querySelector('.completion i')).backgroundColor"
    with opened(browser, f"{ui}samples/a") as page:
        seen = [page.evaluate(color)]
        for what in "version", "none":
            page.check(f"input[value={what}]")
            seen.append(page.evaluate(color))
        assert len(set(seen)) == 3


def test_the_colour_of_tokens_is_kept_in_the_address(ui: str, browser: Any) -> None:
    color = "getComputedStyle(document.querySelector('.completion i')).backgroundColor"
    with opened(browser, f"{ui}group/g?id=4") as page:
        likely = page.evaluate(color)
        page.check("input[value=advantage]")
        chosen = page.evaluate(color)
        page.wait_for_url("**color=advantage**")
        page.reload()
        assert page.is_checked("input[value=advantage]")
        assert page.evaluate(color) == chosen != likely
        page.click("text=trajectory 16")
        page.wait_for_url("**trajectory=16**")
        assert page.is_checked("input[value=advantage]")


@pytest.mark.smoke
def test_runs_are_compared_from_the_list(ui: str, browser: Any) -> None:
    with opened(browser, ui) as page:
        for box in page.query_selector_all("input[type=checkbox]"):
            box.check()
        page.click("form.runs button")
        page.wait_for_url("**/compare?*")
        assert "Runs compared" in main_text(page)


def test_curves_are_chosen_without_a_script(ui: str, browser: Any) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{ui}curves/a?metric=trainer%2Floss")
    page.click(".metrics summary")
    page.check("[value='reward/mean']")
    page.fill("[name=smooth]", "0.9")
    page.fill("[name=to]", "30")
    page.focus("form.curves button")
    page.keyboard.press("Enter")
    page.wait_for_url("**smooth=0.9&from=&to=30*")
    assert page.locator("svg[data-x='1.0 30.0']").count() == 2
    page.click(".chart details:has(table) summary >> nth=0")
    assert page.locator(".chart table >> nth=0").is_visible()
    page.close()


def test_groups_are_compared_from_the_list(ui: str, browser: Any) -> None:
    with opened(browser, f"{ui}?group=seed") as page:
        page.click("text=Compare the groups")
        page.wait_for_url("**/compare?*group=seed")
        assert "seed = 0 (" in main_text(page)


def test_a_drag_over_a_chart_chooses_the_steps_of_all(ui: str, browser: Any) -> None:
    with opened(browser, f"{ui}compare?run=a&run=b&smooth=0.5") as page:
        page.set_viewport_size({"width": 1280, "height": 900})
        box = page.locator("svg[data-x]").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.4 * box["width"], middle)
        assert page.inner_text(".tip").splitlines()[1].startswith("a  ")
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], middle)
        page.mouse.up()
        page.wait_for_url("**smooth=0.5&from=*")
        assert len({chart.get_attribute("data-x") for chart in page.query_selector_all("svg[data-x]")}) == 1


@pytest.mark.parametrize(("width", "folded"), [(1280, False), (400, True)])
def test_contents_stand_beside_a_long_page_or_are_folded_above(
    ui: str, browser: Any, width: int, folded: bool
) -> None:
    with opened(browser, f"{ui}curves/a") as page:
        page.set_viewport_size({"width": width, "height": 900})
        link = page.locator(".contents a[href='#trainer-loss']")
        if folded:
            assert not link.is_visible()
            page.focus(".contents summary")
            page.keyboard.press("Enter")
        link.click()
        assert page.evaluate("location.hash") == "#trainer-loss"
        assert link.bounding_box()["x"] < page.locator("main h1").bounding_box()["x"] or folded


def brightness(color: str) -> int:
    """Of `rgb(1, 2, 3)`."""
    return sum(int(part) for part in color.strip("rgba()").split(",")[:3])


def test_hovering_names_the_curve_and_its_value_there(ui: str, browser: Any) -> None:
    with opened(browser, f"{ui}run/b") as page:
        page.set_viewport_size({"width": 1280, "height": 900})
        chart = page.locator("#chart-staleness svg")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        page.mouse.move(box["x"] + 0.98 * box["width"], box["y"] + box["height"] / 2)
        step_there, mean, largest = page.inner_text(".tip").splitlines()
        assert step_there == "step 40"
        assert (mean.split()[0], largest.split()[0]) == ("mean", "largest")
        assert float(mean.split()[1]) <= float(largest.split()[1])


def test_a_drag_on_the_page_of_a_run_opens_the_curves_of_these_steps(ui: str, browser: Any) -> None:
    with opened(browser, f"{ui}run/b") as page:
        page.set_viewport_size({"width": 1280, "height": 900})
        chart = page.locator("#chart-reward svg")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.4 * box["width"], middle)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], middle)
        page.mouse.up()
        page.wait_for_url("**/curves/b?from=*&to=*")


def test_an_answer_that_changes_nothing_leaves_the_charts_in_their_places(ui: str, browser: Any) -> None:
    first = "window.first = document.querySelector('#chart-reward svg')"
    with opened(browser, f"{ui}run/b") as page:
        page.add_init_script(f"addEventListener('DOMContentLoaded', () => {first})")
        address = page.get_attribute("body", "data-live")
        for again in (
            page.reload,
            lambda: None,
        ):  # an answer is shown before the next question
            with page.expect_response(lambda answer: address in answer.url):
                again()
        assert page.evaluate("first.isConnected")
