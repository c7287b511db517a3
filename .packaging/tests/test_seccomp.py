"""The router serves under the container's seccomp profile, and the profile is what lets it."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import json
import os
import pathlib
import subprocess
import sys
import unittest

import corelane

PROFILE = pathlib.Path(__file__).parents[1] / "seccomp.json"
IO_URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}
ACT_ALLOW = 0x7FFF0000
CMP_MASKED_EQ = 7
LIBRARY = ctypes.util.find_library("seccomp")


class Compare(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("mask", ctypes.c_uint64), ("value", ctypes.c_uint64)]


def confine(profile: dict, without: set[str]) -> None:
    """What a container's runtime does with a profile, for this process and what it becomes."""
    library = ctypes.CDLL(LIBRARY, use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    errno_action = 0x00050000 | profile["defaultErrnoRet"]
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(errno_action)))
    for rule in profile["syscalls"]:
        compares = [Compare(a["index"], CMP_MASKED_EQ, a["value"], 0) for a in rule.get("args", [])]
        for name in set(rule["names"]) - without:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number < 0:
                continue  # Another architecture's.
            array = (Compare * len(compares))(*compares)
            done = library.seccomp_rule_add_array(context, ctypes.c_uint32(ACT_ALLOW), number, len(compares), array)
            if done not in (0, -errno.EEXIST):
                raise OSError(-done, name)
    if library.seccomp_load(context) != 0:
        raise OSError("the profile cannot be loaded")


@unittest.skipUnless(LIBRARY, "there is no libseccomp here")
class Seccomp(unittest.TestCase):
    def under(self, *without: str) -> subprocess.CompletedProcess:
        command = [sys.executable, __file__, ",".join(without), corelane.find_binary()]
        return subprocess.run(
            [*command, "demo", "--load", "4", "--seconds", "2", "--plain", "--port", "0"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_the_router_serves_under_the_profile(self) -> None:
        done = self.under()
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_it_does_not_without_the_calls_of_io_uring(self) -> None:
        done = self.under(*IO_URING)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("corelane doctor", done.stderr)


if __name__ == "__main__":
    confine(json.loads(PROFILE.read_text()), set(sys.argv[1].split(",")))
    os.execv(sys.argv[2], sys.argv[2:])
