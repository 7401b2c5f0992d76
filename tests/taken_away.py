"""Takes away, for the rest of this process, what other systems than Linux, or other builds of Python, lack.

`multiprocessing` and torch, which work there by other means, are imported before, with what they use of this system.
"""

import importlib
import os
import select
import signal
import socket
import sys
import sysconfig

import cloudpickle  # noqa: F401
import torch.utils.data

OF_LINUX = {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING eventfd pidfd_open sched_getaffinity splice copy_file_range",
    select: "epoll",
    socket: "SO_PEERCRED SOCK_SEQPACKET SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC MSG_NOSIGNAL",
}
OF_POSIX = {
    os: "fork forkpty register_at_fork getuid geteuid getpgid killpg wait4 set_blocking sysconf O_CLOEXEC O_NOFOLLOW "
    "O_DIRECTORY O_NONBLOCK pread pwrite pwritev sendfile uname statvfs fchmod getloadavg",
    select: "poll",
    signal: "SIGALRM setitimer SIGHUP SIGUSR1 pthread_kill",
    socket: "MSG_DONTWAIT",
}
# By what a test calls it: the platform, what it lacks, and how `multiprocessing` starts processes there.
WAYS = {
    "macOS": ("darwin", [OF_LINUX], "fork"),
    "Windows": ("win32", [OF_LINUX, OF_POSIX], "spawn"),
    "no memory files": ("linux", [{os: "memfd_create"}], "fork"),
    "no forks": ("linux", [{os: "fork register_at_fork"}], "spawn"),
}


class SysOfLinux:
    """The module `sys` as `multiprocessing` is to see it, which asks for the platform when it is called."""

    platform = "linux"

    def __getattr__(self, name):
        return getattr(sys, name)


def take_away(way):
    platform, lacking, method = WAYS[way]
    torch.multiprocessing.set_start_method(method, force=True)
    sysconfig.get_config_vars()
    for name in "popen_fork", "popen_spawn_posix", "queues", "resource_tracker", "synchronize":
        importlib.import_module(f"multiprocessing.{name}")
    for names in lacking:
        for module, texts in names.items():
            for name in texts.split():
                vars(module).pop(name, None)
    if platform == "win32":
        for name in "fcntl", "resource", "pwd", "grp", "termios":
            sys.modules[name] = None
    for name, module in sys.modules.items():
        if name.startswith("multiprocessing.") and getattr(module, "sys", None) is sys:
            module.sys = SysOfLinux()
    sys.platform = platform
