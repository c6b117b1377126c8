"""An agent is a process: what it sees, what it leaves behind, and how it ends."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millrace.core.errors import ConfigError, DataError, WorkerError
from millrace.episodes.agents.agent_process import AgentEnd, AgentLauncher, AgentLimits, AgentProcess
from millrace.episodes.agents.agents import Agents

FUNCTIONS = Path(__file__).with_name("agent_functions.py")
URL, KEY = "http://127.0.0.1:4444", "key-of-trajectory-7"
SOON_S = 120.0


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """Agents are calls of `solve`, unless a test gives a command."""
    secrets = pytest.MonkeyPatch()
    secrets.setenv("WORKER_SECRET", "hunter2")
    secrets.setenv("HF_TOKEN", "hf_secret")
    secrets.setenv("HTTPS_PROXY", "http://proxy:3128")
    secrets.setenv("all_proxy", "http://proxy:3128")
    with Agents(
        tmp_path_factory.mktemp("agents"),
        function=f"{FUNCTIONS}:solve",
        environment={"TOOL": "hammer", "NO_PROXY": "tools.local"},
    ) as made:
        yield made
    secrets.undo()


def started(agents: Agents, command: list[str] | None, row: dict[str, Any], **options: Any) -> AgentProcess:
    return agents.start(command, row, base_url=URL, key=KEY, **options)


def ended(agents: Agents, command: list[str] | None, row: dict[str, Any], **options: Any) -> AgentEnd:
    process = started(agents, command, row, **options)
    try:
        assert process.wait(SOON_S) is not None, process.last_words
        assert process.end is not None
        return process.end
    finally:
        process.close()


def python(code: str) -> list[str]:
    return ["python", "-c", code.replace("{", "{{").replace("}", "}}")]


def gone(pid: int) -> bool:
    """Whether a process has ended. A zombie that nobody reaps has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def soon(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_agent_sees_the_gateway_and_nothing_secret_of_the_worker(agents: Agents) -> None:
    end = ended(agents, python("import os, json; print(json.dumps(dict(os.environ)))"), {"q": 1})
    seen = json.loads(end.last_words)
    assert seen["OPENAI_BASE_URL"] == f"{URL}/v1" and seen["ANTHROPIC_BASE_URL"] == URL
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == KEY
    assert seen["MILLRACE_ROW"] == f"{end.directory}/row.json"
    assert seen["TOOL"] == "hammer" and seen["PATH"] and seen["HOME"]
    assert seen["NO_PROXY"] == seen["no_proxy"] == "tools.local,127.0.0.1,localhost"
    assert not {"WORKER_SECRET", "HF_TOKEN", "HTTPS_PROXY", "all_proxy"} & set(seen)


def test_an_agent_reads_its_row_in_a_fresh_directory_that_close_removes(agents: Agents) -> None:
    row = {"q": "2 + 2 = ?", "n": [1, {"é": None}]}
    process = started(agents, python("print(open('row.json').read()); print(input())"), row)
    assert process.wait(SOON_S) == 1  # stdin is empty
    assert json.loads(process.last_words.splitlines()[0]) == row
    assert (process.directory / "agent.log").read_text() == process.last_words
    assert "EOFError" in process.last_words
    process.close()
    process.close()
    assert not process.directory.exists()


def test_columns_stand_in_arguments_and_doubled_braces_are_literal(agents: Agents) -> None:
    end = ended(agents, ["echo", "{q}|{n}|{{}}", "{list}"], {"q": "a {b}", "n": 3, "list": ["é"]})
    assert end.last_words == 'a {b}|3|{} ["é"]\n'


def test_an_argument_that_names_a_file_of_the_run_means_that_file(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    assert ended(agents, ["python", "own.py"], {}).last_words == "found\n"


@pytest.mark.parametrize(
    ("command", "row", "words"),
    [
        (["echo", "{question}"], {"q": 1, "a": 2}, "the column `question`.*Its columns: a, q"),
        (["echo", "{q}"], {"q": "x\0"}, "zero byte.*MILLRACE_ROW"),
        (["echo", "{q}"], {"q": "x" * 200_000}, "200,000 bytes.*MILLRACE_ROW"),
        (["echo"], {"when": datetime.date(2020, 1, 1)}, "column `when`.*type date"),
        (["echo"], {"x": [1.0, float("nan")]}, "column `x`.*the number nan"),
        (["echo"], {"x": {1: 2}}, "column `x`.*the key 1"),
    ],
)
def test_a_row_that_cannot_be_given_is_refused_in_words(
    agents: Agents, command: list[str], row: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        started(agents, command, row)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["nonesuch"], "there is no program 'nonesuch'"),
        (["/etc/passwd"], "'/etc/passwd' may not be executed"),
        (["echo", "{"], "for braces"),
        (["echo", "{a.b:>3}"], "the name of a column and nothing else"),
    ],
)
def test_a_command_that_cannot_be_executed_is_one_clear_error(
    agents: Agents, command: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        started(agents, command, {"a": 1})


def test_an_exit_code_and_a_signal_are_told_apart(agents: Agents) -> None:
    end = ended(agents, ["sh", "-c", "echo out; echo err >&2; exit 3"], {})
    assert (end.exit_code, end.signal, end.killed, end.last_words) == (3, None, False, "out\nerr\n")
    end = ended(agents, ["sh", "-c", "kill -TERM $$"], {})
    assert (end.exit_code, end.signal, end.killed) == (None, "SIGTERM", False)


def test_an_agent_that_prints_100_mb_neither_waits_nor_fills_the_disk(agents: Agents) -> None:
    process = started(agents, ["sh", "-c", "yes | head -c 100000000; echo the end"], {})
    assert process.wait(SOON_S) == 0
    assert process.end is not None
    assert process.last_words.endswith("y\nthe end\n") and len(process.last_words) == 65_536
    assert process.end.dropped_bytes == 100_000_008 - 2**20
    assert 2**20 < (process.directory / "agent.log").stat().st_size < 2**20 + 200
    process.close()


def test_the_end_is_called_once_with_how_the_agent_ended(agents: Agents) -> None:
    ends: list[AgentEnd] = []
    process = started(agents, ["true"], {}, on_exit=ends.append)
    assert process.wait(SOON_S) == 0
    soon(lambda: bool(ends))
    process.close()
    assert ends == [process.end]


TREE = """
import os, sys, time
printed, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        os.write(done, b"1")
    else:
        os._exit(0)
    time.sleep(100)
os.read(printed, 1)
time.sleep(100 if sys.argv[1:] else 0)
"""


def test_a_killed_agent_takes_a_daemon_of_its_own_along(agents: Agents) -> None:
    process = started(agents, [*python(TREE), "on"], {})
    soon(lambda: process.last_words.endswith("\n"))
    daemon = int(process.last_words)
    assert not gone(daemon) and process.is_running and process.wait(0) is None
    process.kill()
    assert process.wait(SOON_S) == -signal.SIGKILL
    assert process.end is not None and process.end.killed and process.end.signal == "SIGKILL"
    assert gone(daemon) and gone(process.pid)
    process.close()


def test_a_daemon_ends_when_its_agent_ends_by_itself(agents: Agents) -> None:
    end = ended(agents, python(TREE), {})
    assert end.exit_code == 0 and gone(int(end.last_words))


def test_an_agent_without_memory_fails_alone(agents: Agents) -> None:
    end = ended(agents, python("x = bytearray(2**30)"), {}, limits=AgentLimits(memory_mb=200))
    assert end.exit_code == 1 and "MemoryError" in end.last_words
    end = ended(agents, None, {"what": "memory"}, limits=AgentLimits(memory_mb=200))
    assert end.exit_code == 1 and "MemoryError" in end.last_words


WORKER = """
import os, sys, time
from pathlib import Path
from millrace.episodes.agents.agents import Agents
agents = Agents(Path(sys.argv[1]), function=sys.argv[3])
process = agents.start(["python", "-c", sys.argv[2], "on"], {}, base_url="http://127.0.0.1:1", key="k")
call = agents.start(None, {"what": "sleep"}, base_url="http://127.0.0.1:1", key="k")
while not process.last_words.endswith("\\n"):
    time.sleep(0.01)
child = os.fork()  # holds the worker's sockets open
if child:
    print(process.pid, int(process.last_words), call.pid, agents._launcher.pid, child, flush=True)
time.sleep(100)
"""


def test_a_worker_that_is_killed_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    arguments = [str(tmp_path), TREE, f"{FUNCTIONS}:solve"]
    with subprocess.Popen([sys.executable, "-c", WORKER, *arguments], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        *pids, child = (int(pid) for pid in worker.stdout.readline().split())
        assert len(pids) == 4 and not any(map(gone, pids))
        worker.kill()
        try:
            soon(lambda: all(map(gone, pids)))
            soon(lambda: not list(tmp_path.iterdir()))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_function_gives_its_value(agents: Agents) -> None:
    row = {"what": "value", "n": 1}
    end = ended(agents, None, row)
    assert end.exit_code == 0
    assert end.returned == {"row": row, "base_url": URL, "key": KEY, "cwd": end.directory}
    assert ended(agents, None, {"what": "environment"}).returned == [KEY, None]
    assert ended(agents, None, {"what": "numpy"}).returned == {"reward": 0.5, "each": [0, 1]}


def test_a_module_is_imported_once_and_each_call_is_a_process_of_its_own(agents: Agents) -> None:
    first, second = (ended(agents, None, {"what": "where"}).returned for _ in range(2))
    assert first[0] == second[0] and first[1] != second[1] and first[3] != second[3]
    assert first[2] == second[2] == 1


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("raise", 1, "LookupError: no such tool\n"),
        ("exit", 7, ""),
        ("exit in words", 1, "the tool is broken\n"),
        ("_exit", 9, "before the end\n"),
        ("large", 0, "it has 100,002 bytes as JSON, and at most 65,536"),
        ("object", 0, "Object of type object is not JSON serializable"),
    ],
)
def test_a_function_may_end_in_any_way(agents: Agents, what: str, code: int, words: str) -> None:
    end = ended(agents, None, {"what": what})
    assert (end.exit_code, end.returned) == (code, None)
    assert words in end.last_words


def test_the_last_line_of_an_error_with_notes_is_the_error(agents: Agents) -> None:
    lines = ended(agents, None, {"what": "raise with a note"}).last_words.splitlines()
    assert "During task with name 'model'" in lines and lines[-1] == "LookupError: no such tool"


def test_a_child_of_a_function_ends_with_the_function(agents: Agents) -> None:
    assert gone(int(ended(agents, None, {"what": "fork"}).last_words))


def test_a_function_may_be_async_and_leave_arguments_out(tmp_path: Path) -> None:
    with Agents(tmp_path, function=f"{FUNCTIONS}:think") as agents:
        assert ended(agents, None, {"what": "hm"}).returned == f"hm {KEY}"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"{FUNCTIONS}:asks_for_more", "needs `model`, which nothing provides"),
        (f"{FUNCTIONS}:nonesuch", "nonesuch"),
        ("nonesuch.py:solve", "no file nonesuch.py"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_at_the_start(
    tmp_path: Path, path: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Agents(tmp_path, function=path)


def test_a_module_with_a_thread_is_reported_and_numpy_draws_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = tmp_path / "threaded.py"
    module.write_text(
        "import threading, numpy\n"
        "threading.Thread(target=threading.Event().wait, name='beater', daemon=True).start()\n"
        "def solve(): return numpy.random.random()\n"
    )
    with Agents(tmp_path, function=f"{module}:solve") as agents:
        assert "threads at its import: beater" in caplog.text
        assert ended(agents, None, {}).returned != ended(agents, None, {}).returned


def test_after_the_launcher_is_killed_agents_go_on_and_the_next_start_works(tmp_path: Path) -> None:
    with Agents(tmp_path, function=f"{FUNCTIONS}:solve") as agents:
        before = started(agents, ["sh", "-c", "sleep 0.3; exit 4"], {})
        assert agents._launcher is not None
        os.kill(agents._launcher.pid, signal.SIGKILL)
        assert ended(agents, None, {"what": "value"}).exit_code == 0
        assert before.wait(SOON_S) == 4
        before.close()


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.rename(os.getcwd(), os.getcwd() + '-other')",
        "import os; os.rename(os.getcwd(), os.getcwd() + '-other'); os.mkdir(os.environ['HERE'])",
        "import os, signal; os.rename(os.getcwd(), os.getcwd() + '-other'); os.kill(os.getppid(), 9)",
    ],
    ids=["renamed", "another in its place", "and its warden is killed"],
)
def test_a_directory_that_its_agent_renames_is_removed(tmp_path: Path, code: str) -> None:
    with Agents(tmp_path / "agents") as agents:
        shell = 'HERE=$PWD exec python -c "$0"'
        process = started(agents, ["sh", "-c", shell, code], {})
        assert process.wait(SOON_S) is not None
        assert [path.name.endswith("-other") for path in (tmp_path / "agents").iterdir()].count(True) == 1
        process.close()
        assert not list((tmp_path / "agents").iterdir())


def test_an_agent_that_kills_its_launcher_leaves_no_directory(tmp_path: Path) -> None:
    with Agents(tmp_path / "agents") as agents:
        assert agents._launcher is not None
        process = started(agents, ["sh", "-c", f"kill -9 {agents._launcher.pid}; kill -9 $PPID"], {})
        assert process.wait(SOON_S) is not None
        process.close()
    assert not list((tmp_path / "agents").iterdir())


def test_an_agent_that_kills_its_warden_before_the_warden_speaks_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[socket.socket] = []

    def begin(self: AgentLauncher, link: socket.socket) -> None:
        begun.append(link.dup())
        threading.Thread(target=warden, args=begun[-1:]).start()

    def warden(link: socket.socket) -> None:
        with link:
            link.recv(2**16)
            link.sendall(b'{"begun": 7}\n')

    monkeypatch.setattr(AgentLauncher, "begin", begin)
    with Agents(tmp_path / "agents") as agents:
        process = started(agents, ["true"], {})
        assert (process.wait(SOON_S), process.pid, len(begun)) == (-signal.SIGKILL, 7, 1)
        process.close()


def test_agents_that_kill_their_warden_at_once_run_once(agents: Agents, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    for _ in range(20):
        process = started(agents, ["sh", "-c", f"echo x >> {marks}; kill -9 $PPID"], {})
        assert process.wait(SOON_S) == -signal.SIGKILL
        process.close()
    assert len(marks.read_text().split()) == 20


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGALRM"])
def test_a_signal_to_every_process_ends_no_launcher_and_agents_have_signals_as_usual(
    name: str, agents: Agents
) -> None:
    assert ended(agents, ["true"], {}).exit_code == 0
    assert agents._launcher is not None
    launcher = agents._launcher.pid
    os.kill(launcher, signal.Signals[name])
    end = ended(agents, ["sh", "-c", f"kill -{name.removeprefix('SIG')} $$"], {})
    assert agents._launcher.pid == launcher and (end.exit_code, end.signal) == (None, name)


def test_after_a_warden_is_killed_the_agent_and_its_daemon_end(agents: Agents) -> None:
    process = started(agents, [*python(TREE), "on"], {})
    soon(lambda: process.last_words.endswith("\n"))
    daemon = int(process.last_words)
    os.kill(parent(process.pid), signal.SIGKILL)
    assert process.wait(SOON_S) == -signal.SIGKILL
    soon(lambda: gone(daemon) and gone(process.pid))
    process.close()


def test_without_launcher_and_warden_the_agent_ends(tmp_path: Path) -> None:
    with Agents(tmp_path) as agents:
        process = started(agents, ["sleep", "100"], {})
        assert agents._launcher is not None
        for pid in (agents._launcher.pid, parent(process.pid)):
            os.kill(pid, signal.SIGKILL)
        assert process.wait(SOON_S) == -signal.SIGKILL
        soon(lambda: gone(process.pid))
        process.close()


def test_a_hundred_agents_run_at_once_and_leave_no_process_thread_or_directory(tmp_path: Path) -> None:
    threads = set(threading.enumerate())  # some may end meanwhile
    with Agents(tmp_path, function=f"{FUNCTIONS}:solve") as agents:
        assert agents._launcher is not None
        launcher = agents._launcher.pid
        with ThreadPoolExecutor(8) as pool:
            processes = list(pool.map(lambda n: started(agents, None, {"what": "sleep", "n": n}), range(100)))
        assert len({process.pid for process in processes}) == 100
        assert all(process.is_running for process in processes)
        for process in processes:
            process.kill()
        for process in processes:
            assert process.wait(SOON_S) == -signal.SIGKILL
            process.close()
        children = Path(f"/proc/{launcher}/task/{launcher}/children")
        soon(lambda: not children.read_text().split())
    assert gone(launcher) and all(gone(process.pid) for process in processes)
    assert set(threading.enumerate()) <= threads
    assert not list(tmp_path.iterdir())


def test_close_ends_agents_that_run_and_no_agent_starts_afterwards(tmp_path: Path) -> None:
    agents = Agents(tmp_path)
    process = started(agents, ["sleep", "100"], {})
    agents.close()
    assert process.wait(0) == -signal.SIGKILL and gone(process.pid)
    with pytest.raises(WorkerError, match="the worker is ending"):
        started(agents, ["true"], {})
    assert not list(tmp_path.iterdir())
