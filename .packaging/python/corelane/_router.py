"""``Router``, with the constructor's names of vllm_router."""

from __future__ import annotations

import enum
import http.client
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from . import _args, _process
from ._binary import find_binary

#: Of a command line, a variable or a config file that cannot be.
_EXIT_USAGE = 2


class RouterError(RuntimeError):
    """The router could not start, or has failed. Its text is what the program said."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        #: Of the program; below 0: the signal that ended it; ``None``: it runs.
        self.exit_code = exit_code


class ConfigError(RouterError, ValueError):
    """An argument cannot be."""


class PolicyType(str, enum.Enum):
    """vllm_router's names of policies; the words of ``--policy`` do as well."""

    Random = "random"
    RoundRobin = "round_robin"
    CacheAware = "cache_aware"
    PowerOfTwo = "power_of_two"
    ConsistentHash = "consistent_hash"
    RendezvousHash = "rendezvous_hash"
    StickyLeastLoaded = "sticky_least_loaded"
    PrefixHash = "prefix_hash"
    LeastLoaded = "least_loaded"
    KvAware = "kv_aware"
    ExpectedWait = "expected_wait"


class Router:
    """A router as a process of its own.

    Arguments are vllm_router's, and every other flag of ``corelane --help`` with underscores; lists and mappings are
    several values. What is not given, ``None`` or ``False`` is as on a command line without the flag, but for the port,
    which is that of vllm_router's constructor, and Prometheus, which takes any free port.

    Use it in a ``with`` block, or :meth:`spawn` and :meth:`stop` it; :meth:`start` blocks until the end, as
    vllm_router's does. The router ends with Python, however that ends: it drains then, as on SIGTERM.

    :param worker_urls: the workers; more can be added while it runs.
    :param policy: how a worker is chosen, a name or a :class:`PolicyType`.
    :param host: address to listen on.
    :param port: port to listen on; 0: any free one, see :attr:`url`.
    :param prometheus_port: of the metrics; ``None``: any free one, see :attr:`metrics_url`.
    :param startup_timeout: seconds that it may take until it accepts.
    :param log: is called with each line of the router's log, in a thread; ``None``: they go to standard error.
    :param flags: the rest.
    """

    def __init__(
        self,
        worker_urls: Sequence[str] = (),
        policy: str | PolicyType = PolicyType.CacheAware,
        host: str = "127.0.0.1",
        port: int = 3001,
        *,
        prometheus_port: int | None = None,
        startup_timeout: float = 30.0,
        log: Callable[[str], None] | None = None,
        **flags: Any,
    ) -> None:
        self._settings: dict[str, Any] = {
            "worker_urls": worker_urls,
            "policy": policy,
            "host": host,
            "port": port,
            "prometheus_port": 0 if prometheus_port is None else prometheus_port,
            **flags,
        }
        self._startup_timeout = startup_timeout
        self._log = log or _process.to_standard_error
        self._process: _process.Process | None = None
        self._owner = 0

    @classmethod
    def from_args(cls, args: Any) -> Router:
        """Of vllm_router's ``RouterArgs``, or of a namespace of argparse with its names."""
        return cls(**_args.of_args(args))

    # -- Its life.

    def spawn(self) -> Router:
        """Starts it, and returns when it accepts connections.

        :raises ConfigError: an argument cannot be.
        :raises RouterError: it cannot start, or runs already.
        """
        if self._is_running():
            raise RouterError("the router runs already")
        flags, environment = _args.command_line(self._settings)
        process = _process.Process([find_binary(), *flags], environment, self._log)
        self._process, self._owner = process, os.getpid()
        if not process.wait_listening(self._startup_timeout):
            process.has_ended.wait(1)
            if process.has_ended.is_set():
                raise self._error()
            process.send(signal.SIGKILL)
            process.has_ended.wait()
            raise RouterError(f"the router did not accept within {self._startup_timeout} s: {process.message()}")
        return self

    def start(self) -> None:
        """Starts it and blocks until it has ended, as vllm_router's ``start``.

        In the main thread SIGTERM, SIGINT and SIGHUP are passed on to it meanwhile: it drains, or reads its files again.

        :raises RouterError: as :meth:`spawn`; or it has failed.
        """
        if self._is_running():
            raise RouterError("the router runs already")
        self._process = None
        early: list[int] = []

        def pass_on(number: int, _: Any) -> None:
            if self._process is None:
                early.append(number)
            else:
                self._process.send(number)

        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for sent in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                before[sent] = signal.signal(sent, pass_on)
        try:
            process = self.spawn()._running()
            for number in early:
                process.send(number)
            process.has_ended.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self.wait()

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns when ``/readiness`` says 200: a worker (in P/D one of each role) is ready.

        :raises TimeoutError: none is by then.
        :raises RouterError: the router has ended.
        """
        end = time.monotonic() + timeout
        while not self._is_ready():
            if self._running().has_ended.is_set():
                raise self._error()
            if time.monotonic() > end:
                raise TimeoutError(f"no worker is ready after {timeout} s")
            time.sleep(0.02)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended, and returns 0.

        :raises TimeoutError: it runs still.
        :raises RouterError: it has failed.
        """
        process = self._running()
        if not process.has_ended.wait(timeout):
            raise TimeoutError(f"the router runs still after {timeout} s")
        if process.returncode != 0:
            raise self._error()
        return 0

    def stop(self, timeout: float | None = None) -> int | None:
        """Ends it and returns its exit code: 0 when all running requests have finished.

        :param timeout: after so many seconds it is ended at once, whatever runs (exit code -9). ``None``: what
            ``drain_timeout_secs`` says, 600 s unless given.
        :raises RouterError: it had failed before.
        """
        process = self._process
        # A fork of Python has a copy of this object, and no right to the process.
        if process is None or self._owner != os.getpid():
            return None
        if process.has_ended.is_set():
            return self.wait()
        process.send(signal.SIGTERM)
        if not process.has_ended.wait(timeout):
            process.send(signal.SIGKILL)
            process.has_ended.wait()
        return process.returncode

    def reload(self) -> None:
        """SIGHUP: reads the file of ``config``, keys and certificates again. What comes of it is in the log."""
        self._running().send(signal.SIGHUP)

    def __enter__(self) -> Router:
        return self.spawn()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except RouterError:
            # What has gone wrong in the block says more.
            if error is None:
                raise

    # -- What is known of it.

    @property
    def returncode(self) -> int | None:
        """Its exit code; below 0: the signal that ended it; ``None``: it runs, or was never started."""
        return self._process.returncode if self._process else None

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._running().pid

    @property
    def url(self) -> str:
        """Where it listens, as this machine reaches it: ``http://127.0.0.1:3001``."""
        scheme = "https" if self._settings.get("tls_cert") else "http"
        return f"{scheme}://{self._address('data')}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus is served."""
        return f"http://{self._address('metrics')}/metrics"

    def _address(self, which: str) -> str:
        host, _, port = self._running().addresses[which].rpartition(":")
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"{host}:{port}"

    def _running(self) -> _process.Process:
        if self._process is None:
            raise RouterError("the router was not started")
        return self._process

    def _is_running(self) -> bool:
        return self._process is not None and not self._process.has_ended.is_set()

    def _error(self) -> RouterError:
        process = self._running()
        kind = ConfigError if process.returncode == _EXIT_USAGE else RouterError
        message = process.message() or f"the router ended with exit code {process.returncode}"
        return kind(message, process.returncode)

    def _is_ready(self) -> bool:
        address = self._address("data")
        if self.url.startswith("https:"):
            # It is our own child that is asked, and nothing is told to it.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(address, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/readiness")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
