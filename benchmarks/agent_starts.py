"""What slow starts of agents cost a run: each agent is a command that sleeps before its first request.

    python benchmarks/agent_starts.py [--json] [--seeds 3] [--start-s 2]

Ten steps of four groups of four, of a random model, with two replicas and two reward workers.

turns_per_s, synchronous_turns_per_s   answered turns a second of the schedules `millrace` and `synchronous`
starts_a_group, groups                 agents that were started for a group that was trained; trained groups
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import ROOT, medians, parser_of, report, say, sized

sys.path.append(str(ROOT))

from tests.runs import train
from tests.turn_runs import make_agent_start

from millrace.ledger.reading import LedgerReader
from millrace.observe.sinks.jsonl import read_events
from millrace.run_directory.run_directory import RunDirectory

STEPS = sized(10, 1)
MAIN = "def main() -> None:\n"
STARTS = """    import time
    row = json.loads(Path(os.environ["MILLRACE_ROW"]).read_text())
    with (HERE / "starts").open("a") as file:
        file.write(f"{{row['number']}} ")
    time.sleep({start_s})
"""


def started(directory: Path, start_s: float) -> Path:
    """A configuration whose agent is a command. No row comes twice."""
    config = make_agent_start(directory)
    command = f'command = ["{sys.executable}", "{directory}/acting_agent.py"]'
    text = config.read_text().replace('function = "acting_agent.py:solve"', command)
    config.write_text(text.replace("acting_agent.py:reward", "acting_agent.py:printed"))
    agent, rows = directory / "acting_agent.py", directory / "acting.py"
    agent.write_text(agent.read_text().replace(MAIN, MAIN + STARTS.format(start_s=start_s)))
    text = rows.read_text().replace('"b" * length + ">"', '"b" * (length % 8 + 1) + ">"')
    rows.write_text(text.replace("range(1, 9)", "range(1, 99)"))
    return config


def turns_per_s(run: RunDirectory) -> float:
    """Until the last answer. The first request of an agent is no answer."""
    events = list(read_events(run.events, "run_started", "beginning", "observed", "scored"))
    beginning, answers = set[int](), 0
    for event in events:
        if event.kind == "beginning":
            beginning.update(event.fields["trajectory_ids"])
        elif event.kind != "run_started":
            answers += not (event.kind == "observed" and event.fields["trajectory_id"] in beginning)
            beginning.discard(event.fields["trajectory_id"])
    return answers / (events[-1].time_s - events[0].time_s)


def one_round(seed: int, start_s: float) -> dict[str, float]:
    figures = {}
    for kind, name in ("millrace", "turns_per_s"), ("synchronous", "synchronous_turns_per_s"):
        with tempfile.TemporaryDirectory() as path:
            config = started(Path(path), start_s)
            overrides = f"steps={STEPS}", f'schedule.kind="{kind}"', f"seed={seed}"
            run = train(config, Path(path) / "run", *overrides)
            figures[name] = turns_per_s(run)
            starts = Counter(map(int, (Path(path) / "starts").read_text().split()))
            with LedgerReader(run.ledger) as reader:
                rows = [int(group.row_id.rpartition(":")[2]) + 1 for group in reader.groups()]
            figures |= {
                "starts_a_group": sum(starts[row] for row in rows) / len(rows),
                "groups": float(len(rows)),
            }
    say(f"seed {seed}: {figures}")
    return figures


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=sized(3, 1))
    parser.add_argument("--start-s", type=float, default=sized(2.0, 0.2))
    options = parser.parse_args()
    report(medians([one_round(seed, options.start_s) for seed in range(options.seeds)]), as_json=options.json)


if __name__ == "__main__":
    main()
