#!/usr/bin/env bash
# lighteval 0.13.0: the judge of LiveCodeBench marks right programs wrong that use `global`, `sys.stdin.buffer` or a class Solution.
#
# Expected. lighteval.tasks.tasks.lcb.codegen_metrics.check_correctness says for each test whether a program prints the expected output for its
#   input. A program that does so under `python program.py < input` is right.
# Seen. The program does not run as a module. All statements but imports become the body of a function. So a name at its top level is a local
#   variable, and `global` in a function of the program finds nothing. The text "class Solution" anywhere makes the judge look for a class, which
#   is then local, too. `sys.stdin` is a StringIO, which has no `buffer`. Each of these is -4, an error, and the program counts as failed.
# Output.
#   a plain program                python: right   judge: [True]
#   a counter that is global       python: right   judge: [-4]
#   sys.stdin.buffer               python: right   judge: [-4]
#   a class named Solution         python: right   judge: [-4]
# Why it matters. `sys.stdin.buffer` is the usual way to read fast, and recursive programs count with `global`. So a score of LiveCodeBench measures
#   how programs are written, too. As a reward the judge teaches a model to avoid these forms.
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
{
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps --no-warn-conflicts lighteval==0.13.0
    "$venv/bin/pip" install -q --no-deps --no-warn-conflicts numpy==2.2.6 tqdm==4.67.1
} || exit 2

# The module is loaded by its path, since `import lighteval` wants torch.
cat >"$venv/cases.py" <<'PY'
import importlib.util
import json
import subprocess
import sys
import sysconfig

path = sysconfig.get_path("purelib") + "/lighteval/tasks/tasks/lcb/codegen_metrics.py"
spec = importlib.util.spec_from_file_location("codegen_metrics", path)
judge = importlib.util.module_from_spec(spec)
sys.modules["codegen_metrics"] = judge
spec.loader.exec_module(judge)

INPUT, OUTPUT = "3\n1 2 4\n", "7\n"
PROGRAMS = {
    "a plain program": ("input()\nprint(sum(map(int, input().split())))\n", [True]),
    "a counter that is global": (
        "total = 0\ndef add(number):\n    global total\n    total += number\n"
        "input()\nfor number in map(int, input().split()):\n    add(number)\nprint(total)\n",
        [-4],
    ),
    "sys.stdin.buffer": (
        "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split()[1:])))\n",
        [-4],
    ),
    "a class named Solution": (
        "class Solution:\n    def total(self, numbers):\n        return sum(numbers)\n"
        "input()\nprint(Solution().total(map(int, input().split())))\n",
        [-4],
    ),
}

if __name__ == "__main__":
    sample = {"input_output": json.dumps({"inputs": [INPUT], "outputs": [OUTPUT]})}
    for name, (program, seen) in PROGRAMS.items():
        run = subprocess.run([sys.executable, "-c", program], input=INPUT, capture_output=True, text=True)
        result = judge.check_correctness(sample, program, timeout=6)
        word = "right" if run.stdout == OUTPUT else "wrong"
        print(f"{name:30} python: {word}   judge: {result}")
        assert word == "right", "the program itself is wrong"
        assert result == seen, f"changed: {name}"
PY
"$venv/bin/python" "$venv/cases.py"
