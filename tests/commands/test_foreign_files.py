"""A stranger's run may hold anything under the name of a run's file. Looking at it ends, in words."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.long import covering, few
from tests.look_runs import write_run

from millrace.api.run import Run
from millrace.cli.app import run
from millrace.conversations.tokenizer import load_tokenizer
from millrace.core import files
from millrace.core.errors import DataError, LedgerError, MillraceError
from millrace.run_directory.run_directory import RunDirectory
from millrace_ui.notebook import card
from millrace_ui.record import steps
from millrace_ui.record.steps import Steps
from millrace_ui.site import Site

ROOM_BYTES = 2 << 30
DEADLINE_S = 60
DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n"

NAMES = (
    "config.json", "events.jsonl", "events.000001.jsonl", "metrics.jsonl", "evaluations.jsonl",
    "summary.json", "ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm", "ledger.sqlite.lock",
)  # fmt: skip


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Time and memory for what a test does: what never ends is an error of the test."""

    def late(*_: object) -> None:
        raise TimeoutError("it takes for ever")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES, hard))
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def put_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # such a name has at most 107 bytes
        server.bind(path.name)
        os.chdir(here)


def put_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path], object]] = {
    "endless": put_link,
    "pipe": os.mkfifo,
    "socket": put_socket,
    "directory": Path.mkdir,
    "deep": lambda path: path.write_bytes(DEEP),
    "huge": put_huge,
}


def spoilt(root: Path, name: str, kind: str) -> RunDirectory:
    """A run whose file `name` is another thing."""
    made = write_run(root / "bad")
    (made.path / name).unlink(missing_ok=True)
    KINDS[kind](made.path / name)
    return made


def look_everywhere(made: RunDirectory, out: Path) -> None:
    """With every command and page. Whatever is raised raw fails the test."""
    path = str(made.path)
    for command in ("show", "doctor", "report", "compare", "trace"):
        more = [path] if command == "compare" else []
        named = ["--out", str(out / f"{command}.out")] if command in ("report", "trace") else []
        assert run([command, path, *more, *named]) in (0, 1, 2)
    assert run(["show", path, "--newest"]) in (0, 1, 2)
    assert card(made)
    site = Site(made.path.parent, "/")
    for ask in (
        lambda: site.run("bad", {}),
        lambda: site.data("bad", {}),
        lambda: site.samples("bad", {"text": ["a"]}),
        lambda: site.config("bad", {}),
        lambda: site.compare({"run": ["bad", "good"]}),
    ):
        try:
            ask()
        except (MillraceError, OSError) as error:
            assert str(error)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_under_any_name_holds_up_no_command_and_no_page(tmp_path: Path, name: str) -> None:
    look_everywhere(spoilt(tmp_path, name, "pipe"), tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    covering(
        [kind for kind in KINDS if kind != "pipe"],
        ["config.json", "events.jsonl", "metrics.jsonl", "ledger.sqlite"],
    ),
)
def test_nothing_in_place_of_a_file_takes_a_command_or_page_down(
    tmp_path: Path, name: str, kind: str
) -> None:
    look_everywhere(spoilt(tmp_path, name, kind), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_one_bad_run_is_one_bad_line_in_the_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    spoilt(tmp_path, name, kind)
    write_run(tmp_path / "good")
    assert run(["show", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "unreadable" in listed
    assert "stopped" in listed
    html = Site(tmp_path, "/").runs({}).html
    assert str(tmp_path / "bad" / name) in html
    assert "stopped" in html


@pytest.mark.parametrize("kind", KINDS)
def test_python_reads_such_a_run_or_says_why_not(tmp_path: Path, kind: str) -> None:
    for name in ("summary.json", "metrics.jsonl", "events.jsonl"):
        made = Run(spoilt(tmp_path / name, name, kind).path)
        for ask in (made.summary, made.metrics, made.events):
            try:
                ask()
            except MillraceError as error:
                assert str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_whole_or_refused_in_words(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(DataError, match=str(path)):
        files.read_json(path)


def test_a_file_that_is_not_there_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "none")


def test_a_run_writes_no_links_so_none_is_followed(tmp_path: Path) -> None:
    """A report goes to others: a link could carry a private file into it."""
    (tmp_path / "private").write_text("{}")
    (tmp_path / "file").symlink_to("private")
    with pytest.raises(DataError, match="symbolic link"):
        files.read(tmp_path / "file")


def test_few_bytes_do_not_become_many_columns_of_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_run(tmp_path / "bad")
    wide = ",".join(f'"a{i}":1' for i in range(4_000))
    made.metrics.write_text(
        f'{{"version":1,{wide}}}\n' + "".join(f'{{"version":{v}}}\n' for v in range(2, 60))
    )
    Steps(made.metrics).update()
    monkeypatch.setattr(steps, "VALUES_MAX", 100_000)
    with pytest.raises(DataError, match="4,000 columns of 26 steps"):
        Steps(made.metrics).update()
    made.metrics.write_text(f'{{"version":1,"b":1,{wide},{wide.replace("a", "c")}}}\n')
    with pytest.raises(DataError, match="8,001 columns"):
        Steps(made.metrics).update()


def test_a_configuration_of_many_unknown_keys_is_refused_at_once(tmp_path: Path) -> None:
    made = write_run(tmp_path / "bad")
    keys = ",".join(f'"key{i}":{{}}' for i in range(60_000))
    made.config.write_text(f"{{{keys}}}")
    with pytest.raises(MillraceError) as refused:
        made.read_config()
    assert len(str(refused.value)) < 100_000


@pytest.mark.parametrize("kind", few(["computes", "fetched", "step", "joined", "run_started", "report"], 3))
def test_an_event_that_lacks_its_fields_is_told(tmp_path: Path, kind: str) -> None:
    made = write_run(tmp_path / "bad")
    with made.events.open("a") as file:
        file.write(f'{{"kind":"{kind}","time_s":1.0,"wall_s":1e300}}\n')
    look_everywhere(made, tmp_path)


@pytest.mark.parametrize("kind", few(["pipe", "huge", "endless"]))
def test_the_tokenizer_that_a_run_names_is_as_strange_as_the_run(tmp_path: Path, kind: str) -> None:
    made = write_run(tmp_path / "bad")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        start = tmp_path / "start" / name
        kept = start.read_bytes()
        start.unlink()
        KINDS[kind](start)
        (tmp_path / "start" / "vocab.json").write_text("{}")
        with pytest.raises(DataError):
            load_tokenizer(tmp_path / "start")
        look_everywhere(made, tmp_path)
        start.unlink()
        start.write_bytes(kept)


def test_tokens_that_unfold_to_gigabytes_are_damaged(tmp_path: Path) -> None:
    import zstandard

    from millrace.ledger import codec

    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=1 << 30)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(1 << 10)) + compressor.flush()
    assert len(bomb) < 1 << 20
    with pytest.raises(LedgerError, match="damaged"):
        codec.unpack_prompt(b"z" + bomb)
