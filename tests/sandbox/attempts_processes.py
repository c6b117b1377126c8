"""Attempts at processes: others, and more of its own."""

from tests.sandbox.attempt import attempts

PROCESSES = attempts("""
## reads the environment of its parent
return any(bool(open(f"/proc/{pid}/environ", "rb").read()) for pid in (os.getppid(), facts["pid"]))
## reads the command line of the tests [bare]
return bool(open(f"/proc/{facts['pid']}/cmdline").read())
## reads the memory of its parent
return bool(open(f"/proc/{facts['pid']}/mem", "rb"))
## reads its own maps [bare]
return bool(open("/proc/self/maps").read())
## lists the processes [bare]
return str(facts["pid"]) in os.listdir("/proc")
## opens a descriptor of the parent
return bool(os.listdir(f"/proc/{facts['pid']}/fd"))
## reads a secret of the environment
return any("SECRET" in name for name in os.environ)
## traces the parent
return check(libc.ptrace(16, facts["pid"], 0, 0))
## asks to be traced [bare]
return check(libc.ptrace(0, 0, 0, 0))
## reads memory of another process
buffer = ctypes.create_string_buffer(8)
vector = struct.pack("PN", ctypes.addressof(buffer), 8)
return call(310, 270, facts["pid"], vector, 1, vector, 1, 0) > 0
## writes memory of another process
return call(311, 271, facts["pid"], b"\\0" * 16, 1, b"\\0" * 16, 1, 0) >= 0
## takes a descriptor of another process
return call(438, 438, call(434, 434, facts["pid"], 0), 1, 0) >= 0
## opens a process by pidfd [bare]
return call(434, 434, facts["pid"], 0) >= 0
## asks whether the tests live [bare]
os.kill(facts["pid"], 0)
return True
## signals its parent [bare]
os.kill(os.getppid(), signal.SIGURG)
return os.getppid() > 0
## signals the group of the tests
os.killpg(os.getpgid(facts["pid"]), signal.SIGURG)
return True
## signals everybody
os.kill(-1, signal.SIGURG)
return True
## kills everybody
os.kill(-1, signal.SIGKILL)
return True
## signals through the owner of a pipe [bare]
import fcntl
ends = os.pipe()
fcntl.fcntl(ends[0], fcntl.F_SETOWN, facts["pid"])
return True
## signals a thread of the tests [bare]
return call(234, 131, facts["pid"], facts["pid"], 0) == 0
## queues a signal
return call(129, 138, facts["pid"], signal.SIGURG, ctypes.create_string_buffer(128)) == 0
## lowers the priority of the tests [bare]
os.setpriority(os.PRIO_PROCESS, facts["pid"], os.getpriority(os.PRIO_PROCESS, facts["pid"]))
return True
## moves the tests to one processor [bare]
os.sched_setaffinity(facts["pid"], os.sched_getaffinity(facts["pid"]))
return True
## takes real-time priority
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
return True
## forks [bare]
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
return True
## forks by clone3
return call(435, 435, ctypes.create_string_buffer(64), 64) >= 0
## starts a shell [bare]
return subprocess.run(["/bin/sh", "-c", "exit 0"]).returncode == 0
## becomes a shell
os.execv("/bin/sh", ["/bin/sh", "-c", "sleep 0"])
return True
## forks a bomb
while True:
    os.fork()
## forks a bomb, with permission [forks]
started = 0
try:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(30)
        started += 1
except OSError:
    pass
return started > 60
## starts threads without end
import threading
threading.stack_size(65536)
gate = threading.Event()
for _ in range(200):
    threading.Thread(target=gate.wait, daemon=True).start()
return True
## leaves a daemon behind, with permission [forks]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.close(3), os.close(4)
        time.sleep(600)
    os._exit(0)
time.sleep(0.05)
return False
## runs a setuid program, with permission [forks]
done = subprocess.run(["/usr/bin/su", "-c", "id"], capture_output=True, stdin=subprocess.DEVNULL)
return b"uid=0" in done.stdout
## preloads a library into a program, with permission [forks]
done = subprocess.run(["/bin/ls", "/root"], env={"LD_PRELOAD": "/private/x.so"}, capture_output=True)
return done.returncode == 0 and b".ssh" in done.stdout
## kills everybody, with permission [forks]
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
return False
## kills the first process of its namespace, with permission [forks]
if os.fork() == 0:
    os.kill(1, signal.SIGKILL)
    os._exit(0)
os.wait()
return False
## becomes root
os.setuid(0)
return os.geteuid() == 0 and bool(os.listdir("/root"))
## becomes another user
os.setresuid(12345, 12345, 12345)
return True
## changes its groups
os.setgroups([0])
return True
## takes capabilities
header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
return call(126, 91, header, ctypes.create_string_buffer(struct.pack("=6I", *[0xFFFFFFFF] * 6))) == 0
## becomes dumpable [bare]
return check(libc.prctl(4, 1, 0, 0, 0))
## outlives its warden [bare]
return check(libc.prctl(1, 0, 0, 0, 0))
## becomes a reaper [bare]
return check(libc.prctl(36, 1, 0, 0, 0))
## makes a user namespace
return check(libc.unshare(0x10000000))
## makes a user namespace by clone
return call(56, 220, 0x10000000 | 17, 0, 0, 0, 0) >= 0
## enters another namespace
return check(libc.setns(os.open(f"/proc/{facts['pid']}/ns/mnt", os.O_RDONLY), 0))
## eats all memory
buffers = []
while True:
    buffers.append(bytearray(2**24))
## maps all memory
return bool(mmap.mmap(-1, 2**33))
## locks memory
memory = mmap.mmap(-1, 2**20)
return check(libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory))), 2**20))
## opens files without end
files = [os.open(".", os.O_RDONLY) for _ in range(5000)]
return True
## uses up the pipes
pipes = [os.pipe() for _ in range(2000)]
return True
## computes without end
while True:
    pass
## sleeps without end [waits]
while True:
    time.sleep(10)
## stops itself [waits]
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(30)
return True
## ignores every signal and computes
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""")
