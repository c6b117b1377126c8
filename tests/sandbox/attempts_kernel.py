"""Attempts at the network, and at calls of the kernel that no program needs."""

from tests.sandbox.attempt import attempts

KERNEL = attempts("""
## opens a TCP socket [bare]
return bool(socket.socket())
## connects to a service of this machine [bare]
socket.create_connection(("127.0.0.1", facts["port"]), 2).close()
return True
## listens [bare]
made = socket.socket()
made.bind(("127.0.0.1", 0))
made.listen()
return True
## sends a datagram [bare]
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", facts["port"]))
return True
## opens an IPv6 socket
return bool(socket.socket(socket.AF_INET6))
## looks up a name [bare]
return bool(socket.getaddrinfo("localhost", 80))
## sends raw packets
return bool(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
## sends raw IP
return bool(socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
## connects to a UNIX socket [bare]
socket.socket(socket.AF_UNIX).connect(facts["socket"])
return True
## connects to an abstract UNIX socket [bare]
socket.socket(socket.AF_UNIX).connect("\\0" + facts["abstract"])
return True
## sends from a pair of datagram sockets to another address [bare]
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", "\\0" + facts["abstract"] + "-datagram")
return True
## asks the kernel by netlink [bare]
return bool(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
## talks to the host of a virtual machine
made = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
made.settimeout(0.5)
made.connect((2, 1024))
return True
## opens the crypto socket of the kernel
return bool(socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
## opens a Bluetooth socket
return bool(socket.socket(31, socket.SOCK_RAW, 1))
## gives a descriptor away
pair = socket.socketpair()
return bool(socket.send_fds(pair[0], [b"x"], [0]))
## uses a descriptor that it inherited
return any(bool(os.fstat(number)) for number in range(5, 64))
## asks for System V shared memory [bare]
return call(29, 194, 0, 4096, 0o1600) >= 0
## asks for System V semaphores [bare]
return call(64, 190, 0, 1, 0o1600) >= 0
## asks for a System V message queue [bare]
return call(68, 186, 0, 0o1600) >= 0
## asks for a POSIX message queue
return call(240, 180, b"escape", os.O_CREAT | os.O_RDWR, 0o600, None) >= 0
## asks for keys of the user [bare]
return call(250, 219, 0, -3, 1) >= 0
## adds a key
return call(248, 217, b"user", b"escape", b"x", 1, -3) >= 0
## loads a BPF program
return call(321, 280, 0, ctypes.create_string_buffer(128), 128) >= 0
## counts events of the processor
return call(298, 241, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0
## makes an io_uring
return call(425, 425, 4, ctypes.create_string_buffer(256)) >= 0
## handles page faults
return call(323, 282, 1) >= 0
## loads a kernel module
return call(175, 105, b"", 0, b"") >= 0
## loads a new kernel
return call(246, 104, 0, 0, None, 0) >= 0
## restarts the machine
return call(169, 142, 0, 0, 0, None) >= 0
## sets the clock
time.clock_settime(time.CLOCK_REALTIME, time.time())
return True
## sets the name of the host
socket.sethostname("escape")
return True
## switches off the randomness of addresses [bare]
return check(libc.personality(0x0040000))
## accounts processes
return call(163, 89, None) >= 0
## reads the log of the kernel
return call(103, 116, 3, ctypes.create_string_buffer(64), 64) >= 0
## turns on swap
return call(167, 224, b"x", 0) >= 0
## sets a quota
return call(179, 60, 0, None, 0, None) >= 0
## uses system calls of 32 bits
if platform.machine() == "x86_64":
    return call(0x40000000 + 39, 0) >= 0
raise PermissionError("no such calls here")
## adds a filter that hides its own
return call(317, 277, 1, 0, b"\\0" * 16) >= 0
## loosens Landlock
return call(444, 444, ctypes.create_string_buffer(struct.pack("Q", 1)), 8, 0) >= 0
## pushes characters into a terminal
import fcntl
return fcntl.ioctl(0, 0x5412, b"x") == 0
## moves pages of another process
return call(256, 238, facts["pid"], 0, None, None) >= 0
## compares kernel objects of processes
return call(312, 272, facts["pid"], os.getpid(), 0, 0, 0) >= 0
## makes a kernel-side copy into a pipe of the tests
return call(278, 77, 0, 1, 4096, 0) >= 0
""")
