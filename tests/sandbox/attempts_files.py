"""Attempts at files: reading secrets, writing outside, filling the disk."""

from tests.sandbox.attempt import attempts

FILES = attempts("""
## reads a file of the user [bare]
return open(facts["secret"]).read() == facts["word"]
## lists the directory of a file of the user [bare]
return bool(os.listdir(os.path.dirname(facts["secret"])))
## reads the home directory [bare]
return bool(os.listdir(facts["home"]))
## reads the password file [bare]
return bool(open("/etc/passwd").read())
## reads through a symbolic link [bare]
os.symlink(facts["secret"], "link")
return open("link").read() == facts["word"]
## reads through a hard link
os.link(facts["secret"], "hard")
return open("hard").read() == facts["word"]
## renames a file of the user into its directory
os.rename(facts["writable"], "mine")
return True
## walks up with dots [bare]
return open("../" * 30 + facts["secret"]).read() == facts["word"]
## opens with openat2
how = ctypes.create_string_buffer(struct.pack("QQQ", 0, 0, 0))
return call(437, 437, -100, facts["secret"].encode(), how, 24) > 0
## opens by file handle
return call(304, 265, -100, ctypes.create_string_buffer(128), 0) >= 0
## writes next to a file of the user [bare]
open(facts["writable"] + ".new", "w").write("x")
return True
## overwrites a file of the user [bare]
open(facts["writable"], "w").write("x")
return True
## truncates a file of the user by reading it
os.close(os.open(facts["writable"], os.O_RDONLY | os.O_TRUNC))
return os.stat(facts["writable"]).st_size == 0
## truncates a file of the user by name
os.truncate(facts["writable"], 0)
return True
## deletes a file of the user
os.unlink(facts["writable"])
return True
## changes the mode of a file of the user [bare]
os.chmod(facts["writable"], 0o666)
return True
## changes the owner of a file of the user [bare]
os.chown(facts["writable"], os.getuid(), os.getgid())
return True
## changes the times of a file of the user [bare]
os.utime(facts["writable"], (0, 0))
return True
## gives a file of the user an attribute
os.setxattr(facts["writable"], "user.millrace", b"x")
return True
## makes a setuid file
open("tool", "w").write("x")
os.chmod("tool", 0o4777)
return True
## makes a directory in /tmp outside [bare]
os.mkdir(facts["base"] + "/made")
return os.path.exists(facts["base"] + "/made")
## writes into the standard library
open(os.path.join(os.path.dirname(os.__file__), "millrace_escape.py"), "w").write("x")
return True
## leaves a .pth file
import sysconfig
open(sysconfig.get_path("purelib") + "/escape.pth", "w").write("import os")
return True
## leaves a sitecustomize
open(os.path.dirname(os.__file__) + "/sitecustomize.py", "w").write("import os")
return True
## overwrites a compiled module
import json
open(json.__cached__, "r+b").write(b"x")
return True
## writes where the package is [bare]
open(facts["package"] + "/escape.py", "w").write("")
return True
## leaves a file in shared memory [bare]
open(facts["shared"], "w").write("x")
return True
## makes shared memory by multiprocessing [bare]
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=4096)
made.close()
made.unlink()
return True
## makes a file that has no name, in memory [bare]
return os.memfd_create("escape") >= 0
## makes a secret memory
return call(447, 447, 0) >= 0
## makes a device
os.mknod("disk", 0o060666, os.makedev(8, 0))
return True
## opens the disk
return any(bool(os.open(f"/dev/{name}", os.O_RDONLY)) for name in ("vda", "sda", "nvme0n1"))
## reads the memory of the machine
return bool(os.open("/dev/mem", os.O_RDONLY))
## opens the terminal
return bool(os.open("/dev/tty", os.O_RDWR))
## allocates a terminal
return bool(os.open("/dev/ptmx", os.O_RDWR))
## opens FUSE
return bool(os.open("/dev/fuse", os.O_RDWR))
## makes a named pipe outside [bare]
os.mkfifo(facts["base"] + "/fifo")
return True
## mounts a file system
return check(libc.mount(b"none", b".", b"tmpfs", 0, None))
## unmounts the root
return check(libc.umount2(b"/", 2))
## mounts with the new calls
return call(430, 430, b"tmpfs", 0) >= 0
## changes the root
os.mkdir("root")
os.chroot("root")
return True
## moves the root
os.mkdir("old")
return call(155, 41, b".", b"old") == 0
## keeps a directory and leaves a new root
directory = os.open("/", os.O_RDONLY)
os.chroot(".")
os.fchdir(directory)
return True
## watches files of others
return check(libc.inotify_init1(0))
## watches the file system
return check(libc.fanotify_init(0, 0))
## fills the disk with one file
with open("large", "wb") as file:
    for _ in range(64):
        file.write(b"x" * 2**20)
return True
## fills the disk with many files
for index in range(40):
    open(f"large-{index}", "wb").write(b"x" * 2**20)
    time.sleep(0.005)
return True
## makes very many files
for index in range(20_000):
    open(f"small-{index}", "w").close()
return True
## reserves the disk
os.posix_fallocate(os.open("large", os.O_CREAT | os.O_RDWR), 0, 2**30)
return True
## extends a file by truncation
os.truncate(os.open("large", os.O_CREAT | os.O_RDWR), 2**40)
return True
## dumps core outside
import resource
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
return True
## makes a tree that nobody can remove
for _ in range(150):
    os.mkdir("deep")
    os.chdir("deep")
os.umask(0o777)
os.mkdir("closed")
return False
## raises the limits
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**40, 2**40))
return True
## sets limits of the parent [bare]
import resource
resource.prlimit(facts["pid"], resource.RLIMIT_CORE, (0, 0))
return True
""")
