"""The router's process: started, watched and ended, and never left behind."""

from __future__ import annotations

import collections
import os
import secrets
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

#: Lines of its log that are kept for a message.
_LINES_KEPT = 200
_CREDENTIALS = struct.Struct("3i")
_SCM_CREDENTIALS = getattr(socket, "SCM_CREDENTIALS", 2)


def to_standard_error(line: str) -> None:
    """Where log lines go unless somebody wants them: past ``sys.stderr``, whose lock may be gone when Python ends."""
    os.write(2, (line + "\n").encode(errors="replace"))


class Process:
    """A running router.

    A thread starts it, reads its log and waits for its end. Linux ties a child's life to the thread that started it, and
    this one lives as long as the router or Python does.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Callable[[str], None]) -> None:
        """Returns when the program has been started; :raises OSError: it cannot be."""
        self.returncode: int | None = None
        self.addresses: dict[str, str] = {}
        self.has_ended = threading.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
        self._log = log
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"corelane-{os.getpid()}-{secrets.token_hex(8)}"
        self._notify.bind("\0" + name)
        own = {"NOTIFY_SOCKET": "@" + name, "CORELANE_PARENT_PID": str(os.getpid())}
        self._started = threading.Event()
        self._error: OSError | None = None
        args = (list(command), {**os.environ, **environment, **own})
        threading.Thread(target=self._run, args=args, name="corelane", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            self._notify.close()
            raise self._error

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            # A session of its own: Ctrl-C is for Python, which then says what to do.
            self._child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        lines = self._child.stderr
        assert lines is not None
        for line in lines:
            text = line.decode(errors="replace").rstrip("\n")
            self._lines.append(text)
            try:
                self._log(text)
            except Exception:  # noqa: BLE001  The log's reader must not end: the router would wait for it some day.
                self._log = to_standard_error
        lines.close()
        self.returncode = self._child.wait()
        self.has_ended.set()

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_listening(self, timeout: float) -> bool:
        """Whether it accepts, within so many seconds; ``False`` too when it has ended."""
        end = time.monotonic() + timeout
        # Later messages are for nobody; an unread socket would only fill up.
        with self._notify:
            self._notify.settimeout(0.05)
            while not self.addresses and time.monotonic() < end:
                try:
                    data, control, _, _ = self._notify.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
                except socket.timeout:  # TimeoutError from Python 3.10 on.
                    if self.has_ended.is_set():
                        break
                    continue
                if self._is_from_child(control):
                    self._read(data.decode(errors="replace"))
        return bool(self.addresses)

    def _is_from_child(self, control: list[tuple[int, int, bytes]]) -> bool:
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
                return bool(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0] == self.pid)
        return False

    def _read(self, message: str) -> None:
        fields = dict(line.split("=", 1) for line in message.splitlines() if "=" in line)
        if fields.get("READY") == "1":
            names = {
                "X_CORELANE_ADDRESS": "data",
                "X_CORELANE_METRICS_ADDRESS": "metrics",
                "X_CORELANE_ADMIN_ADDRESS": "admin",
            }
            self.addresses = {short: fields[name] for name, short in names.items() if name in fields}

    def send(self, signal: int) -> None:
        """Sends a signal, unless it has ended: the number may be another process's then."""
        if not self.has_ended.is_set():
            try:
                self._child.send_signal(signal)
            except ProcessLookupError:
                pass

    def message(self) -> str:
        """What it said of its failure, without the frame; empty: nothing."""
        lines = list(self._lines)
        for at in reversed(range(len(lines))):
            for prefix in ("error: ", "corelane: "):
                if lines[at].startswith(prefix):
                    said = [lines[at][len(prefix) :]]
                    for line in lines[at + 1 :]:
                        if not line.strip():
                            break
                        said.append(line.strip())
                    return " ".join(said)
        return next((line for line in reversed(lines) if line.strip()), "")
