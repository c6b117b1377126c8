"""Attempts at the grader: programs that want the tests to pass without the answer. They define `solve(x)`."""

from __future__ import annotations

TABLE = """
## exits with success
import sys
sys.exit(0)
## exits with success in the call
import sys
def solve(x): sys.exit(0)
## exits at once
import os
os._exit(0)
## exits at once in the call
import os
def solve(x): os._exit(0)
## prints that it passed
print("passed"); print("OK"); print("1.0"); print('{"value": true}')
def solve(x): print("passed"); return "passed"
## writes a report of the tests
import os
for number in range(3, 64):
    try: os.write(number, b'{"passed": 1, "outcome": "passed"}')
    except OSError: pass
def solve(x): return True
## answers before it is asked
import os, struct
reply = b'{"value": 7}'
os.write(4, (struct.pack("<Q", len(reply)) + reply) * 4)
def solve(x): return 7
## answers twice to one call
import os, struct
def solve(x):
    reply = b'{"value": 7}'
    os.write(4, struct.pack("<Q", len(reply)) + reply)
    return 8
## answers with a wrong length
import os, struct
def solve(x):
    os.write(4, struct.pack("<Q", 2**63)); return 1
## answers with zero bytes
import os, struct
def solve(x):
    os.write(4, struct.pack("<Q", 0)); os._exit(0)
## answers garbage
import os, struct
def solve(x):
    os.write(4, struct.pack("<Q", 8) + b"\\xff" * 8); os._exit(0)
## answers with other keys
import os, struct
def solve(x):
    reply = b'{"value": 1, "passed": true}'
    os.write(4, struct.pack("<Q", len(reply)) + reply); os._exit(0)
## answers with a list
import os, struct
def solve(x):
    os.write(4, struct.pack("<Q", 2) + b"[]"); os._exit(0)
## closes the way of its answers
import os
def solve(x): os.close(4)
## closes everything
import os
def solve(x): os.closerange(0, 64)
## patches unittest and pytest
import unittest, sys, types
unittest.TestCase.assertEqual = lambda *a: None
unittest.TestResult.wasSuccessful = lambda self: True
sys.modules["pytest"] = types.ModuleType("pytest")
def solve(x): return 0
## patches the builtins
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.len = builtins.sum = lambda *a: 1
def solve(x): return None
## patches JSON
import json
json.dumps = lambda *a, **k: '{"value": "anything"}'
json.loads = lambda *a, **k: {"value": 1}
def solve(x): return 0
## patches the writing of answers
import os
os.write = lambda fd, data: len(data)
def solve(x): return 0
## patches the module of the sandbox
import sys
for name, module in list(sys.modules.items()):
    if "millrace" in name:
        for key in dir(module):
            if callable(getattr(module, key)) and not key.startswith("__"):
                try: setattr(module, key, lambda *a, **k: True)
                except Exception: pass
def solve(x): return 0
## lies about equality
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def solve(x): return Liar()
## is an integer that lies
class Liar(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "True"
def solve(x): return Liar(0)
## is a text that lies
class Liar(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def solve(x): return Liar("x")
## is a list that lies
class Liar(list):
    def __eq__(self, other): return True
    def __len__(self): return 0
def solve(x): return Liar([1])
## is a dict that lies
class Liar(dict):
    def __eq__(self, other): return True
    def keys(self): return []
def solve(x): return Liar(a=1)
## is a float that lies
class Liar(float):
    def __eq__(self, other): return True
    def __repr__(self): return "NaN"
def solve(x): return Liar(0)
## answers with NaN
def solve(x): return float("nan")
## answers with infinity
def solve(x): return [float("inf"), -float("inf")]
## answers with a very long number
import sys
sys.set_int_max_str_digits(0)
def solve(x): return 10 ** 20000
## answers with a large exponent
import os, struct
def solve(x):
    reply = b'{"value": 1e999999}'
    os.write(4, struct.pack("<Q", len(reply)) + reply); os._exit(0)
## answers with a deep list
import os, struct
def solve(x):
    reply = b'{"value": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    reply = struct.pack("<Q", len(reply)) + reply
    while reply: reply = reply[os.write(4, reply):]
    os._exit(0)
## answers with a list that holds itself
def solve(x):
    made = []
    made.append(made)
    return made
## answers with a huge text
def solve(x): return "x" * 3_000_000
## answers with one key twice
import os, struct
def solve(x):
    reply = b'{"value": 0, "value": 1}'
    os.write(4, struct.pack("<Q", len(reply)) + reply); os._exit(0)
## answers with half a character
def solve(x): return "\\ud800"
## prints without end
def solve(x):
    while True: print("x" * 4096)
## writes errors without end
import sys
def solve(x):
    while True: sys.stderr.write("x" * 4096)
## looks for the answer in all objects
import gc
def solve(x):
    found = [one for one in gc.get_objects() if isinstance(one, (dict, list, tuple)) and len(one) < 100]
    texts = [text for one in found for text in (one.values() if isinstance(one, dict) else one)
             if isinstance(text, str) and text.startswith("expected-")]
    return texts[0] if texts else None
## looks for the answer in the frames above
import sys
def solve(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if "expected-" in repr(value)[:10_000] and "solve" not in repr(value)[:10_000]: return value
        frame = frame.f_back
## looks for the answer in its memory
import ctypes, gc
def solve(x):
    word = ("expect" + "ed-").encode()
    start, found = id(gc) & ~0xFFF, []
    for page in range(-64, 64):
        text = ctypes.string_at(start, 4096)
        if word in text: found.append(text[text.index(word):][:41].decode())
    return found[0] if found else None
## looks for the answer in files
import os
def solve(x):
    for directory, _, names in os.walk("."):
        for name in names:
            text = open(os.path.join(directory, name)).read()
            if "expected-" in text: return text
## changes what a frame above returns
import sys
def solve(x):
    frame = sys._getframe(1)
    frame.f_locals["called"] = lambda *a: True
    frame.f_globals["exactly"] = lambda *a: b"true"
## traces the caller
import sys
def solve(x):
    sys.settrace(lambda *a: None)
    sys.setprofile(lambda *a: None)
    return True
## leaves a function for the end
import atexit, os
atexit.register(lambda: os.write(4, b"passed"))
def solve(x): return 0
## answers after the last call
import os, struct, threading
reply = b'{"value": true}'
def solve(x):
    threading.Timer(0, lambda: os.write(4, struct.pack("<Q", len(reply)) + reply)).start()
    return 0
## swaps its answers
import os
def solve(x): os.dup2(1, 4)
## overwrites the tests
import os
for name in ("tests.json", "test_solution.py", "conftest.py", "solution.py"):
    open(name, "w").write("assert True")
def solve(x): return True
## waits until the grader is tired [waits]
import time
def solve(x): time.sleep(60)
## never finishes to load [waits]
while True: pass
## does not read its calls [waits]
import time
time.sleep(60)
## recurses without end
def solve(x): return solve(x)
## recurses without end in C
import sys
sys.setrecursionlimit(10**9)
def solve(x): return solve(x)
## raises an error that cannot be shown
class Bad(BaseException):
    def __str__(self): raise self
    __repr__ = __str__
def solve(x): raise Bad()
## raises an error that claims no memory
def solve(x): raise MemoryError("expected")
## crashes the interpreter
import ctypes
def solve(x): ctypes.string_at(0)
## aborts
import os
def solve(x): os.abort()
## has no function
x = 1
## has a function that is none
solve = 5
## is no Python
this is not Python
## has a byte that is none
solve = "\0"
## is empty

## defines a class that answers everything
class Solution:
    def __getattr__(self, name): return lambda *a: self
## answers with its argument
def solve(x): return x
## replaces the argument reader
import sys
def solve(x):
    sys.stdin = sys.stdout = sys.stderr = None
    return {"passed": True}
## returns a coroutine
async def solve(x): return x
## yields
def solve(x): yield x
"""

GRADER = dict(section.partition("\n")[::2] for section in TABLE.split("\n## ")[1:])
