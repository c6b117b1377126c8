"""The server of pages: this machine only, its token only, reading only; and always an answer in words."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.look_runs import PROMPT, write_run
from tests.unit.observe_events import step
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from millrace.observe.sinks.jsonl import MetricsLog
from millrace.observe.sinks.log_files import rotate
from millrace_curation.curate import Curation, CurationOptions
from millrace_curation.output import summarized, write_summary
from millrace_ui.server import Ui
from millrace_ui.site import Site

Get = Callable[..., Awaitable[HTTPResponse]]
AGAIN = b'http-equiv="refresh"'
VIEWS = (
    "",
    "run/a",
    "curves/a",
    "speed/a",
    "speed/a?outlook=1",
    "samples/a",
    "config/a",
    "compare?run=a&run=b",
    "compare",
    "data/a",
)


def asked(root: Path, ask: Callable[[Ui, Get], Awaitable[Any]]) -> Any:
    """What `ask` returns, with a server of the runs in `root`."""

    async def serve() -> Any:
        ui = Ui(lambda base: Site(root, base))

        async def get(path: str, **named: Any) -> HTTPResponse:
            address = path if path.startswith("http") else ui.url + path
            return await AsyncHTTPClient().fetch(address, raise_error=False, request_timeout=60, **named)

        try:
            return await ask(ui, get)
        finally:
            ui.close()

    return asyncio.run(serve())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in "a", "b":
        write_run(root / name)
    return root


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_and_obeys_nothing_of_a_run(root: Path, view: str) -> None:
    answer = asked(root, lambda _, get: get(view))
    assert answer.code == 200
    assert PROMPT.encode() not in answer.body
    assert "script-src 'self';" in answer.headers["Content-Security-Policy"]
    assert answer.body.count(b"<script") == (not view.startswith("data")), "of all pages, in its own file"


@pytest.mark.parametrize("choice", ["newest", "best", "worst", "failed", "no-such"])
def test_samples_are_chosen_in_the_address(root: Path, choice: str) -> None:
    answer = asked(root, lambda _, get: get(f"samples/a?choice={choice}"))
    assert answer.code == 200
    assert (b"&lt;script&gt;" in answer.body) == (choice != "failed")


NONSENSE = "smooth=x&from=9&to=-1&by=z&log=%00&band=q&group=%3Czz%3E&metric=%3Czz%3E&metric=reward%2Fmean"


@pytest.mark.parametrize(
    ("view", "code"),
    [
        ("curves/a?", 200),
        ("compare?run=a&run=b&", 200),
        ("svg?run=a&run=b&", 404),  # no step is in the range from 0 to 9 with a value above 0
        ("csv?run=b&", 200),
        ("run/a?", 200),
    ],
)
def test_an_address_that_makes_no_sense_has_a_sensible_answer(root: Path, view: str, code: int) -> None:
    answer = asked(root, lambda _, get: get(view + NONSENSE))
    assert answer.code == code
    assert b"<zz>" not in answer.body and b"Traceback" not in answer.body


def test_an_address_that_is_no_text_is_refused(root: Path) -> None:
    assert asked(root, lambda _, get: get("curves/a?group=%FF")).code == 400


def test_a_curve_is_a_file_and_none_is_said(root: Path) -> None:
    async def ask(_: Ui, get: Get) -> list[HTTPResponse]:
        paths = (
            "svg?run=a&metric=reward/mean",
            "csv?run=a&metric=no",
            "svg",
            "csv?run=gone&metric=reward/mean",
        )
        return [await get(path) for path in paths]

    file, *wrong = asked(root, ask)
    assert file.headers["Content-Disposition"] == 'attachment; filename="a-reward-mean.svg"'
    assert file.headers["Content-Type"].startswith("image/svg+xml") and file.body.startswith(b"<svg")
    assert [answer.code for answer in wrong] == [404] * 3
    assert all(answer.headers["Content-Type"].startswith("text/plain") for answer in wrong)


def test_a_search_tells_how_far_it_looked(root: Path) -> None:
    body = asked(root, lambda _, get: get("samples/a?text=script&num=3")).body.decode()
    assert "Looked at 3 trajectories" in body
    assert "Look further back" in body


def test_without_the_token_there_is_nothing(root: Path) -> None:
    async def ask(ui: Ui, get: Get) -> list[int]:
        origin = f"http://127.0.0.1:{ui.port}"
        paths = ("/", "/wrong/", "/wrong/run/a", "/wrong/page.js")
        return [(await get(origin + path)).code for path in paths]

    assert asked(root, ask) == [404] * 4


def test_another_name_of_this_machine_is_refused(root: Path) -> None:
    answer = asked(root, lambda _, get: get("", headers={"Host": "evil.example"}))
    assert answer.code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_but_reading_is_allowed(root: Path, method: str) -> None:
    answer = asked(root, lambda _, get: get("run/a", method=method, allow_nonstandard_methods=True))
    assert answer.code == 405


@pytest.mark.parametrize("name", ["../../etc", "..%2f..%2fetc", "c", "a/../../x", "a%00"])
def test_a_name_that_is_no_run_is_said(root: Path, name: str) -> None:
    answer = asked(root, lambda _, get: get(f"config/{name}"))
    assert answer.code == 404 or b"there is no run" in answer.body


def test_a_live_page_gets_what_is_new_and_then_a_sentence_when_the_run_is_gone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    write_run(tmp_path / "b")

    async def ask(_: Ui, get: Get) -> list[dict[str, Any]]:
        answers = [json.loads((await get("data/a")).body)]
        log = MetricsLog(run.metrics)
        log(step(99.0, 5))
        log.close()
        answers.append(json.loads((await get("data/a?by=tokens")).body))
        shutil.rmtree(run.path)
        return [*answers, json.loads((await get("data/a?by=time")).body)]

    before, after, gone = asked(tmp_path, ask)
    assert 'data-x="1.0 4.0"' in before["html"]["chart-reward"]
    assert 'data-x="100.0 500.0"' in after["html"]["chart-reward"]
    assert before["next_s"] >= 2
    assert "there is no run a" in gone["html"]["notice"]


def test_a_page_of_a_run_has_its_curves_without_a_script(root: Path) -> None:
    body = asked(root, lambda _, get: get("run/a")).body.decode()
    drawn = body.partition("<script")[0]
    assert drawn.count("<svg") == drawn.count("id=chart-") > 5
    assert "Where the time went" in drawn and 'class="spent"' in drawn
    ids = re.findall(r'\bid="?([\w-]+)', body)
    assert {"lanes", "timeline", "chart-reward"} <= set(ids) and len(ids) == len(set(ids))


def test_a_damaged_run_is_a_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    run.metrics.write_bytes(b"\xff\xfe\n")
    body = asked(tmp_path, lambda _, get: get("run/a")).body.decode()
    assert "not a whole step" in body
    assert "Traceback" not in body


def test_damage_is_said_at_every_look(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    run.metrics.write_bytes(b"not json\n" + run.metrics.read_bytes())
    run.events.write_bytes(run.events.read_bytes() + b"not json\n")

    async def ask(_: Ui, get: Get) -> list[bytes]:
        damaged = [(await get(view)).body for view in ("run/a", "run/a", "data/a")]
        run.metrics.unlink()
        return [*damaged, *[(await get("run/a")).body for _ in range(2)]]

    *metrics, first, second = asked(tmp_path, ask)
    assert all(b"not a whole step" in body for body in metrics)
    assert b"not an event" in first and b"not an event" in second


def test_who_asks_too_early_gets_the_newest_answer_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("millrace_ui.site.time.monotonic", lambda: now_s)
    site = Site(root, "/")
    first = site.data("a", {})
    now_s = 1e6
    second = site.data("a", {})
    assert second is not first
    assert site.data("a", {}) is second


def test_a_page_in_trouble_loads_itself_again_until_the_trouble_is_over(tmp_path: Path) -> None:
    async def ask(_: Ui, get: Get) -> list[bytes]:
        bodies = [(await get(view)).body for view in ("", "config/a", "run/a")]
        write_run(tmp_path / "a")
        return bodies + [(await get(view)).body for view in ("", "config/a", "run/a")]

    *before, runs, config, run = asked(tmp_path, ask)
    assert [AGAIN in body for body in before] == [True, True, False]
    assert b"/data/a" in before[2], "its script asks again, and loads the page when there is an answer"
    assert not any(AGAIN in body for body in (runs, config, run))


def test_an_answer_that_takes_too_long_is_said_in_words_and_asked_for_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(Site, "runs", busy)
    body = asked(root, lambda _, get: get("")).body
    assert b"the machine is busy" in body and AGAIN in body


def test_a_page_that_only_a_forecast_made_slow_does_not_load_itself_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise TimeoutError

    async def ask(_: Ui, get: Get) -> list[bytes]:
        return [(await get(view)).body for view in ("speed/a?outlook=1", "speed/a")]

    monkeypatch.setattr(Site, "speed", busy)
    forecast, plain = asked(root, ask)
    assert b"Load the page again" in forecast and AGAIN not in forecast
    assert AGAIN in plain


def test_a_run_is_there_while_its_events_are_rotated(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    rotate(run.events)
    body = asked(tmp_path, lambda _, get: get("run/a")).body.decode()
    assert "Timeline" in body and "<b>replica-0</b>" in body


def test_a_comparison_says_that_events_are_not_all_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_ui.overview.SLICE_BYTES", 400)
    monkeypatch.setattr("millrace_ui.overview.Overview.update", lambda run: run.story.update(400))
    html = Site(root, "/").compare({"run": ["a", "b"]}).html
    assert html.count("of the events are read") == 2
    assert AGAIN in asked(root, lambda _, get: get("compare?run=a&run=b")).body


def test_a_directory_whose_name_is_no_text_hides_no_other_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b").path.rename(f"{tmp_path}/b\udcff")
    answer = asked(tmp_path, lambda _, get: get(""))
    assert answer.code == 200
    assert b"/run/a" in answer.body


def test_a_curation_beside_the_runs_has_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    summary = summarized(Curation([]), CurationOptions(), {"task": "<rows>", "model": "m"})
    for place in ("cu<r", "a"):
        (tmp_path / place).mkdir(exist_ok=True)
        write_summary(summary, tmp_path / place)
    (tmp_path / "a" / "curation.json").write_text("{}")

    async def ask(_: Ui, get: Get) -> list[HTTPResponse]:
        return [await get(path) for path in ("", "curation/cu%3Cr", "curation/a", "curation/..%2Fa")]

    runs, page, damaged, outside = asked(tmp_path, ask)
    assert all(answer.code == 200 for answer in (runs, page, damaged, outside))
    assert b"curation/cu%3Cr" in runs.body and b"cu<r" not in runs.body
    assert b"Curation of &lt;rows&gt;" in page.body
    assert b"it is no summary of a curation" in damaged.body
    assert b"there is no curation ../a" in outside.body
