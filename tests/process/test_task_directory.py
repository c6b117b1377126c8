"""A task directory in Harbor's format, without a container."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.core.errors import DataError, RewardError
from millrace.episodes.agents.agent_process import AgentProcess
from millrace.episodes.agents.agents import Agents
from millrace.episodes.agents.task_directories.task_directory import TaskDirectory, read_task
from millrace.episodes.agents.task_directories.task_tests import run_tests

WRITES = "echo 1 > /logs/verifier/reward.txt\n"


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with Agents(tmp_path_factory.mktemp("agents")) as made:
        yield made


def task_at(path: Path, files: dict[str, str]) -> Path:
    for name, text in {"instruction.md": "Sort it.\n", "tests/test.sh": WRITES, **files}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def reward(agents: Agents, task: TaskDirectory, agent: str = "true") -> float:
    """Of an agent that is a shell script, tested where it worked."""
    process = agents.start(
        ["sh", "-c", agent], {}, base_url="http://127.0.0.1:1", key="k", prepare=task.lay_out
    )
    try:
        assert process.wait(120) == 0, process.last_words
        return run_tests(agents, task, process.directory)
    finally:
        process.close()


def test_a_task_is_its_instruction_limits_and_files(tmp_path: Path) -> None:
    toml = (
        "[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 1.5\nenv = { A = 'b' }\n"
        "[environment]\nmemory = '2G'\n"
    )
    task = read_task(task_at(tmp_path, {"task.toml": toml}))
    assert task.instruction == "Sort it.\n"
    assert (task.agent_timeout_s, task.test_timeout_s, task.memory_mb) == (30, 1.5, 2048)
    assert task.test_environment == {"A": "b"}
    task = read_task(task_at(tmp_path / "plain", {}))
    assert (task.agent_timeout_s, task.test_timeout_s, task.memory_mb) == (600, 600, None)


def test_an_agent_is_scored_by_tests_that_it_has_not_seen(agents: Agents, tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": "FROM python:3.13\n# data\nWORKDIR /app\nCOPY numbers.txt \\\n  data/\n",
        "environment/numbers.txt": "2\n1\n",
        "tests/expected.txt": "1\n2\n",
        "tests/test.sh": (
            "cmp /tests/expected.txt /app/data/sorted.txt && echo $GRADE > /logs/verifier/reward.txt\n"
            "[ -e /app/tests ] || [ -e /app/Dockerfile ] && rm /logs/verifier/reward.txt; exit 1\n"
        ),
        "task.toml": "[verifier]\nenv = { GRADE = '0.5' }\n",
    }
    task = read_task(task_at(tmp_path, files))
    assert reward(agents, task, "sort data/numbers.txt > data/sorted.txt") == 0.5
    planted = "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; touch data/sorted.txt"
    with pytest.raises(RewardError, match=r"neither logs/verifier/reward.txt nor reward.json.*code 1.*EOF"):
        reward(agents, task, planted)


def test_a_link_in_place_of_the_logs_is_not_followed(agents: Agents, tmp_path: Path) -> None:
    (tmp_path / "other" / "verifier").mkdir(parents=True)
    (tmp_path / "other" / "verifier" / "kept").touch()
    task = read_task(task_at(tmp_path / "task", {}))
    assert reward(agents, task, f"ln -s {tmp_path}/other logs") == 1.0
    assert (tmp_path / "other" / "verifier" / "kept").exists()


def test_paths_of_the_container_are_mapped_in_every_file_of_the_tests(agents: Agents, tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": "FROM python:3.13\nWORKDIR /srv/task/\n",
        "instruction.md": "Write 391 into `/srv/task/answer.txt`.\n",
        "tests/test.sh": 'OUT="${OUT:-/srv/task/answer.txt}"\n/tests/checks/run "$OUT"\n',
        "tests/checks/run": "#!/bin/sh\ngrep -q 391 $1 /srv/task/answer.txt\n"
        "cat $(cat /tests/checks/path) && echo 0.5 > /logs/verifier/reward.txt\n",
        "tests/checks/path": "/srv/task/answer.txt",
    }
    path = task_at(tmp_path, files)
    (path / "tests" / "checks" / "run").chmod(0o755)
    task = read_task(path)
    assert task.instruction == "Write 391 into `answer.txt`.\n"
    assert reward(agents, task, "echo 391 > answer.txt") == 0.5


GRADE = "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
WRITTEN = "grep -q 391 /app/answer.txt"


@pytest.mark.parametrize(
    "files",
    [
        {"tests/test.sh": f"/tests/check {GRADE}", "tests/check": f"#!/bin/sh\n{WRITTEN}\n"},
        {"tests/test.sh": f"#!/bin/bash\nif {WRITTEN}\nthen\n  true {GRADE}fi\n".replace("\n", "\r\n")},
        {
            "tests/test.sh": f"bash /tests/check.sh {GRADE}",
            "tests/check.sh": f"if {WRITTEN}; then\r\n exit 0\r\nfi\r\nexit 1\r\n",
        },
        {"tests/test.sh": f"\ufeff#!/bin/bash\n{WRITTEN} {GRADE}"},
        {"tests/test.sh": f"{WRITTEN} && printf '\\xef\\xbb\\xbf1' > /logs/verifier/reward.txt"},
        {
            "tests/test.sh": "#!/usr/bin/env python3\nright = '391' in open('/app/answer.txt').read()\n"
            "print(int(right), file=open('/logs/verifier/reward.txt', 'w'))\n",
        },
        {"tests/test.sh": f"rm -r /logs/verifier; mkdir /logs/verifier; {WRITTEN} {GRADE}"},
        {
            "environment/Dockerfile": "FROM ubuntu\nWORKDIR /root\n",
            "tests/test.sh": f"grep -q 391 ~/answer.txt {GRADE}",
        },
        {"tests/test.sh": f"no-such-python || {WRITTEN} {GRADE}"},
    ],
    ids=[
        "no right",
        "CR LF",
        "CR LF below",
        "mark",
        "mark in the reward",
        "Python",
        "new logs",
        "home",
        "or",
    ],
)
def test_tests_run_as_in_a_container(agents: Agents, tmp_path: Path, files: dict[str, str]) -> None:
    path = task_at(tmp_path, files)
    for name, text in files.items():
        (path / name).write_bytes(text.encode())
    assert reward(agents, read_task(path), "echo 391 > answer.txt") == 1.0


def test_links_to_paths_of_the_container_lead_into_the_directories(agents: Agents, tmp_path: Path) -> None:
    path = task_at(
        tmp_path,
        {
            "tests/test.sh": f"bash /tests/link.sh {GRADE}",
            "tests/check.sh": "grep -q 391 /app/data/link.txt\n",
            "environment/real.txt": "391\n",
            "environment/data/other.txt": "",
        },
    )
    (path / "tests" / "link.sh").symlink_to("/tests/check.sh")
    (path / "environment" / "data" / "link.txt").symlink_to("/app/real.txt")
    assert reward(agents, read_task(path), "grep -q 391 data/link.txt") == 1.0


def test_what_dockerignore_names_is_not_copied(agents: Agents, tmp_path: Path) -> None:
    names = ("solution.sh", "a/b/x.pyc", "a/kept.pyc", "a/b/y.txt", "secret/key")
    path = task_at(
        tmp_path,
        {
            **{f"environment/{name}": "" for name in names},
            "environment/.dockerignore": "# no copies\nsolution.sh\n**/*.pyc\nsecret/\n!a/kept.pyc\n",
            "tests/test.sh": "cd /app; find a secret solution.sh -type f | sort > logs/files\n"
            f"cmp logs/files /tests/files {GRADE}",
            "tests/files": "a/b/y.txt\na/kept.pyc\n",
        },
    )
    assert reward(agents, read_task(path)) == 1.0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"no-such-tool /app {GRADE}", "the command `no-such-tool`"),
        (f"python -m no_such_module {GRADE}", "the Python module `no_such_module`"),
        (f"python -c 'import no_such_module' {GRADE}", "the Python module `no_such_module`"),
        (f"python /tests/check.py {GRADE}", "the Python module `no_such_module`"),
        (f"python -m pytest -p no:cacheprovider /tests/check.py {GRADE}", "module `no_such_module`"),
        (f"python -m pytest --no-such /tests/check.py {GRADE}", "a pytest that takes `--no-such`"),
    ],
)
def test_tests_that_need_what_this_machine_has_not_are_an_error(
    agents: Agents, tmp_path: Path, script: str, words: str
) -> None:
    files = {"tests/test.sh": script, "tests/check.py": "import no_such_module\n"}
    with pytest.raises(RewardError, match=words):
        reward(agents, read_task(task_at(tmp_path, files)))


@pytest.mark.parametrize(
    "script",
    [
        f"python /app/solution.py {GRADE}",
        f"PATH=$PATH:/app sort-it {GRADE}",
        f"cd /app; python -c 'import sorter' {GRADE}",
        f"cd /app; PYTHONPATH=. python -m pytest -p no:cacheprovider /tests/check.py {GRADE}",
    ],
)
def test_what_the_agent_did_not_make_or_has_not_earns_nothing(
    agents: Agents, tmp_path: Path, script: str
) -> None:
    files = {
        "instruction.md": "Write sort-it and sorter.py, and solution.py.\n",
        "tests/test.sh": script,
        "tests/check.py": "import solution\n",
    }
    task = read_task(task_at(tmp_path, files))
    assert reward(agents, task, "echo import no_such_module > solution.py") == 0.0


def test_a_path_outside_of_workdir_needs_a_container(agents: Agents, tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": "FROM ubuntu\nWORKDIR /app/src\n",
        "tests/test.sh": "bash /tests/check\n",
        "tests/check": "ls /app/src /app/build\n",
    }
    with pytest.raises(DataError, match="check names /app, which is outside of WORKDIR"):
        reward(agents, read_task(task_at(tmp_path, files)))


def test_a_task_that_works_in_the_root_is_mapped_too(agents: Agents, tmp_path: Path) -> None:
    files = {
        "environment/Dockerfile": "FROM python:3.13\nWORKDIR /\n",
        "instruction.md": "Write 391 into /answer.txt.\n",
        "tests/test.sh": "grep -q 391 /answer.txt && echo 1 > /logs/verifier/reward.txt\n",
    }
    task = read_task(task_at(tmp_path, files))
    assert task.instruction == "Write 391 into answer.txt.\n"
    assert reward(agents, task, "echo 391 > answer.txt") == 1.0


def test_the_json_of_a_reward_comes_before_the_text(agents: Agents, tmp_path: Path) -> None:
    script = "echo 0 > /logs/verifier/reward.txt; echo '{\"reward\": 0.5}' > /logs/verifier/reward.json"
    assert reward(agents, read_task(task_at(tmp_path, {"tests/test.sh": script}))) == 0.5


@pytest.mark.parametrize(
    ("text", "value"), [("0.25", 0.25), ('{"reward": 1, "speed": 3}', 1.0), ('{"tests": 0.75}', 0.75)]
)
def test_a_reward_may_be_json(agents: Agents, tmp_path: Path, text: str, value: float) -> None:
    task = read_task(
        task_at(tmp_path, {"tests/test.sh": f"echo '{text}' > logs/verifier/reward.json"}),
    )
    assert reward(agents, task) == value


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ("echo good > /logs/verifier/reward.txt", "could not convert"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "several entries"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "symbolic link"),
        ("echo starting; sleep 100", "did not end within 0.5 s.*starting"),
    ],
)
def test_tests_without_a_reward_are_an_error(
    agents: Agents, tmp_path: Path, script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = AgentProcess.wait

    def once_it_printed(process: AgentProcess, timeout_s: float) -> int | None:
        said = process.directory / "logs" / "verifier" / "test-stdout.txt"
        while process.is_running and "sleep" in script and not (said.exists() and said.stat().st_size):
            time.sleep(0.01)
        return wait(process, timeout_s)

    monkeypatch.setattr(AgentProcess, "wait", once_it_printed)
    timeout_s = 0.5 if "sleep" in script else 60
    files = {"tests/test.sh": script, "task.toml": f"[verifier]\ntimeout_sec = {timeout_s}\n"}
    with pytest.raises(RewardError, match=words):
        reward(agents, read_task(task_at(tmp_path, files)))


CONTAINERS = [
    (
        {"task.toml": "[environment]\ndocker_image = 'org/image:1'\n"},
        "an image: `docker_image = 'org/image:1'`",
    ),
    ({"environment/Dockerfile": "FROM python\nRUN make\n"}, "more than FROM, WORKDIR and COPY: `RUN make`"),
    ({"environment/Dockerfile": "FROM org/image:1\n"}, "an image that others have filled"),
    ({"environment/Dockerfile": "FROM a\nFROM b\n"}, "others have filled"),
    ({"environment/Dockerfile": "FROM a\nCOPY x /etc/x\n"}, "files outside of its WORKDIR"),
    ({"environment/Dockerfile": "FROM a\nCOPY --from=b x .\n"}, "a copy from elsewhere"),
    ({"environment/docker-compose.yaml": "services:\n"}, "several containers"),
    ({"tests/test.sh": "sudo apt-get -y install curl\n"}, "packages of the system"),
]


@pytest.mark.parametrize(("files", "words"), CONTAINERS)
def test_a_task_that_needs_a_container_is_refused_unless_the_command_starts_one(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    path = task_at(tmp_path, files)
    with pytest.raises(DataError, match=words):
        read_task(path)
    assert read_task(path, in_container=True).image is None


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"instruction.md": " "}, "instruction.md is empty"),
        ({"task.toml": "[agent\n"}, "not valid TOML"),
        ({"task.toml": "agent = 1\n"}, "`agent` must be a table"),
        ({"task.toml": "[agent]\ntimeout_sec = 0\n"}, "`agent.timeout_sec` must be a positive number"),
        ({"task.toml": "[environment]\nmemory = 'much'\n"}, "the memory 'much' is not understood"),
        ({"task.toml": "[verifier]\nenv = { A = '${A}' }\n"}, "`verifier.env.A`"),
        ({"environment/Dockerfile": "FROM a\nCOPY ../x .\n"}, "from outside of the directory"),
    ],
)
def test_a_task_that_is_wrong_is_refused_in_words(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_task(task_at(tmp_path, files))


def test_a_directory_without_a_task_says_what_a_task_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*instruction.md. A task directory has instruction.md"):
        read_task(tmp_path)
