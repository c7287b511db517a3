"""The installed package: its command, its API and the launcher, against simulated workers. Python's own library only.

    python -m unittest discover -s .packaging/tests

in an environment with the wheels of ``corelane`` and ``corelane-vllm-router``. ``REFERENCE_HELP`` may name a file with the
help of vllm-router's Python launcher: its flags are then compared with ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import unittest
import urllib.request

import corelane
from corelane import _args, vllm_router

WORKER = ["mock-worker", "--port", "0", "--prefill-tps", "instant", "--itl", "instant"]


def run(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(args, check=False, capture_output=True, text=True, timeout=30, **kwargs)


def ask(url: str, text: str = "hello", **fields) -> dict:
    body = {"model": "mock", "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def is_gone(pid: int, within: float = 10.0) -> bool:
    """Whether that process has ended (as a zombie of another parent, too)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


class Packaged(unittest.TestCase):
    """With two simulated workers."""

    @classmethod
    def setUpClass(cls) -> None:
        command = [corelane.find_binary(), *WORKER, "--workers", "2"]
        cls.workers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cls.urls = [cls.workers.stdout.readline().strip() for _ in range(2)]

    @classmethod
    def tearDownClass(cls) -> None:
        cls.workers.terminate()
        cls.workers.wait(10)
        cls.workers.stdout.close()

    def router(self, **flags) -> corelane.Router:
        self.lines: list[str] = []
        flags = {"worker_urls": self.urls, "port": 0, "cores": 1, "log": self.lines.append, **flags}
        router = corelane.Router(**flags)
        self.addCleanup(lambda: router.stop(5) if router.returncode is None else None)
        return router


class Command(Packaged):
    def test_the_command_is_in_the_environment_and_is_the_module(self) -> None:
        command = os.path.join(sysconfig.get_path("scripts"), "corelane")
        self.assertEqual(corelane.find_binary(), command)
        version = run(command, "--version").stdout
        self.assertRegex(version, r"^corelane \d+\.\d+\.\d+")
        self.assertEqual(run(sys.executable, "-m", "corelane", "--version").stdout, version)
        self.assertEqual(version.split()[1], __import__("importlib.metadata").metadata.version("corelane"))

    def test_a_binary_that_is_named_and_not_there_is_an_error(self) -> None:
        done = run(sys.executable, "-m", "corelane", env={**os.environ, "CORELANE_BINARY": "/nowhere"})
        self.assertIn("CORELANE_BINARY is /nowhere", done.stderr)


class Api(Packaged):
    def test_a_router_routes_and_ends_with_its_block(self) -> None:
        with self.router() as router:
            router.wait_ready(20)
            self.assertEqual(ask(router.url)["object"], "chat.completion")
            with urllib.request.urlopen(router.metrics_url, timeout=5) as page:
                self.assertIn('vllm_router_requests_total{route="/v1/chat/completions"} 1', page.read().decode())
            pid = router.pid
            self.assertIsNone(router.returncode)
        self.assertEqual(router.returncode, 0)
        self.assertTrue(is_gone(pid))
        self.assertTrue(any("listening" in line for line in self.lines), self.lines)

    def test_running_requests_finish_when_it_is_stopped(self) -> None:
        slow = subprocess.Popen(
            [corelane.find_binary(), "mock-worker", "--port", "0", "--itl", "50", "--prefill-tps", "instant"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            with self.router(worker_urls=[slow.stdout.readline().strip()]) as router:
                router.wait_ready(20)
                answers: list[dict] = []
                asking = threading.Thread(
                    target=lambda: answers.append(ask(router.url, max_tokens=30, ignore_eos=True))
                )
                asking.start()
                time.sleep(0.4)
                self.assertEqual(router.stop(), 0)
                asking.join(10)
            self.assertEqual(answers[0]["usage"]["completion_tokens"], 30)
        finally:
            slow.terminate()
            slow.wait(10)
            slow.stdout.close()

    def test_an_argument_that_cannot_be_is_a_value_error_with_the_programs_words(self) -> None:
        router = self.router(cache_threshold=7)
        with self.assertRaisesRegex(ValueError, "cache-threshold.*must be from 0 to 1") as raised:
            router.spawn()
        self.assertIsInstance(raised.exception, corelane.ConfigError)
        self.assertEqual(raised.exception.exit_code, 2)
        with self.assertRaisesRegex(corelane.ConfigError, "--no-such-flag"):
            self.router(no_such_flag=1).spawn()

    def test_a_port_that_is_taken_is_an_error_with_the_programs_words(self) -> None:
        with self.router() as first:
            port = int(first.url.rpartition(":")[2])
            with self.assertRaisesRegex(corelane.RouterError, f"cannot listen on 127.0.0.1:{port}") as raised:
                self.router(port=port).spawn()
            self.assertNotIsInstance(raised.exception, ValueError)
            self.assertEqual(raised.exception.exit_code, 1)

    def test_a_router_that_dies_says_so(self) -> None:
        with self.assertRaises(corelane.RouterError) as raised, self.router() as router:
            os.kill(router.pid, signal.SIGKILL)
            with self.assertRaises(corelane.RouterError):
                router.wait(10)
        self.assertEqual(raised.exception.exit_code, -signal.SIGKILL)

    def test_workers_that_are_not_there_are_a_time_out(self) -> None:
        with self.router(worker_urls=["http://127.0.0.1:9"]) as router, self.assertRaises(TimeoutError):
            router.wait_ready(0.5)

    def test_keys_are_not_in_the_list_of_processes(self) -> None:
        with self.router(api_key="tell-nobody", admin_api_key="nor-this") as router:
            with open(f"/proc/{router.pid}/cmdline", "rb") as line:
                words = line.read()
            self.assertNotIn(b"tell-nobody", words)
            self.assertNotIn(b"nor-this", words)
            connection = http.client.HTTPConnection(router.url.rpartition("/")[2], timeout=5)
            connection.request("GET", "/workers")
            self.assertEqual(connection.getresponse().status, 401)
            connection.close()

    def test_a_thread_that_started_it_may_end(self) -> None:
        router = self.router()
        thread = threading.Thread(target=router.spawn)
        thread.start()
        thread.join(20)
        time.sleep(0.5)
        self.assertIsNone(router.returncode)
        router.wait_ready(20)
        self.assertEqual(router.stop(10), 0)

    def test_no_router_is_left_when_python_is_killed(self) -> None:
        script = "import corelane, time; r = corelane.Router(port=0, cores=1).spawn(); print(r.pid, flush=True); time.sleep(60)"
        python = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        pid = int(python.stdout.readline())
        python.stdout.close()
        self.assertFalse(is_gone(pid, 0.2))
        python.kill()
        python.wait(10)
        self.assertTrue(is_gone(pid))

    def test_start_blocks_and_sigterm_drains_it(self) -> None:
        script = "import corelane; corelane.Router(port=0, cores=1, log=lambda line: print(line, flush=True)).start(); print('over')"
        python = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        while "listening" not in python.stdout.readline():
            self.assertIsNone(python.poll())
        python.send_signal(signal.SIGTERM)
        self.assertEqual(python.stdout.read().splitlines()[-1], "over")
        self.assertEqual(python.wait(10), 0)
        python.stdout.close()

    def test_a_fork_of_python_does_not_end_it(self) -> None:
        with self.router() as router:
            pid = os.fork()
            if pid == 0:
                os._exit(0 if router.stop(0.1) is None else 1)
            self.assertEqual(os.waitpid(pid, 0)[1], 0)
            self.assertIsNone(router.returncode)


class Arguments(unittest.TestCase):
    def test_the_constructors_names_are_flags(self) -> None:
        line = lambda **settings: _args.command_line(settings)[0]
        self.assertEqual(line(worker_urls=["http://a", "http://b"]), ["--worker-urls", "http://a", "http://b"])
        self.assertEqual(line(policy=corelane.PolicyType.PowerOfTwo), ["--policy=power_of_two"])
        self.assertEqual(line(policy="random", disable_retries=True), ["--policy=random", "--disable-retries"])
        self.assertEqual(line(log_dir=None, enable_igw=False, worker_urls=[], selector={}), [])
        self.assertEqual(line(retry_max_retries=0), ["--retry-max-retries=0"])
        self.assertEqual(line(selector={"app": "v", "x": "y"}), ["--selector", "app=v", "x=y"])
        self.assertEqual(line(max_concurrent_requests=-1), ["--max-concurrent-requests=-1"])
        self.assertEqual(
            line(prefill_urls=[("http://p", 9000), ("http://q", None), "http://r"], decode_urls=["http://d"]),
            ["--prefill", "http://p", "9000", "--prefill", "http://q", "none", "--prefill", "http://r"]
            + ["--decode", "http://d"],
        )
        self.assertEqual(_args.command_line({"api_key": "k"}), ([], {"CORELANE_API_KEY": "k"}))

    def test_a_policy_type_of_vllm_router_is_known_by_its_name(self) -> None:
        class PolicyType:
            def __str__(self) -> str:
                return "PolicyType.CacheAware"

        self.assertEqual(_args.command_line({"policy": PolicyType()})[0], ["--policy=cache_aware"])

    def test_router_args_say_what_is_not_their_default(self) -> None:
        @dataclasses.dataclass
        class RouterArgs:
            worker_urls: list = dataclasses.field(default_factory=list)
            port: int = 30000
            policy: str = "cache_aware"
            bootstrap_port_annotation: str = "vllm.ai/bootstrap-port"
            mini_lb: bool = False
            vllm_pd_disaggregation: bool = False
            service_discovery: bool = False
            prefill_urls: list = dataclasses.field(default_factory=list)

        given = RouterArgs(worker_urls=["http://a"], policy="random", prefill_urls=[("http://p", None)])
        self.assertEqual(_args.of_args(given), {"worker_urls": ["http://a"], "policy": "random"})
        given.vllm_pd_disaggregation = True
        settings = _args.of_args(given)
        self.assertEqual(settings["prefill_urls"], [("http://p", None)])
        self.assertNotIn("worker_urls", settings)
        namespace = argparse.Namespace(worker_urls=["http://a"], port=1)
        self.assertEqual(_args.of_args(namespace), {"worker_urls": ["http://a"], "port": 1})


class Launcher(Packaged):
    def test_the_launcher_routes(self) -> None:
        command = os.path.join(sysconfig.get_path("scripts"), "vllm-router")
        line = [
            command,
            "--worker-url",
            *self.urls,
            "--port",
            "1",
            "--port",
            "0",
            "--prometheus-port=0",
            "--cores",
            "1",
        ]
        launched = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        try:
            said = launched.stderr.readline()
            while "listening" not in said:
                self.assertIsNone(launched.poll(), said)
                said = launched.stderr.readline()
            address = re.search(r"address=(\S+)", re.sub(r"\x1b\[[0-9;]*m", "", said))[1]
            end = time.monotonic() + 20
            while True:
                try:
                    self.assertEqual(ask(f"http://{address}")["object"], "chat.completion")
                    break
                except OSError:
                    self.assertLess(time.monotonic(), end)
                    time.sleep(0.05)
            launched.send_signal(signal.SIGTERM)
            self.assertEqual(launched.wait(20), 0)
        finally:
            launched.kill()
            launched.wait(10)
            launched.stderr.close()

    def test_arguments_are_read_as_argparse_does(self) -> None:
        translate = lambda line: vllm_router.translate(line.split())
        self.assertEqual(translate("--worker-url http://a http://b"), ["--worker-urls", "http://a", "http://b"])
        self.assertEqual(translate("--worker-urls a b --worker-urls c"), ["--worker-urls", "c"])
        self.assertEqual(translate("--port 1 --port=2 --policy random"), ["--port=2", "--policy=random"])
        self.assertEqual(translate("--request-id-headers --disable-retr"), ["--disable-retries"])
        self.assertEqual(
            translate("--vllm-pd --prefill http://p 9000 --prefill http://q none --decode http://d --decode http://e"),
            ["--vllm-pd-disaggregation", "--prefill", "http://p", "9000", "--prefill", "http://q", "none"]
            + ["--decode=http://d", "--decode=http://e"],
        )
        self.assertEqual(translate("--max-concurrent-requests -1"), ["--max-concurrent-requests=-1"])
        self.assertEqual(translate("--selector app=v x=y"), ["--selector", "app=v", "x=y"])

    def test_corelanes_own_flags_pass(self) -> None:
        shown = run(corelane.find_binary(), "--help").stdout
        own = set(re.findall(r"^ +(?:-\w, )?(--[a-z0-9-]+)", shown, re.MULTILINE))
        self.assertGreater(len(own), 100)
        known = {f"--{name}" for name in (vllm_router._SWITCHES + vllm_router._VALUES).split()}
        known |= {f"--{name}" for name in (vllm_router._LISTS + " " + vllm_router._REPEATED + " prefill").split()}
        for flag in sorted(own - known):
            self.assertEqual(vllm_router.translate([flag, "x"]), [flag, "x"])

    def test_an_argument_that_cannot_be_is_exit_code_2(self) -> None:
        done = run(sys.executable, "-m", "corelane.vllm_router", "--cache-threshold", "7")
        self.assertEqual(done.returncode, 2)
        self.assertIn("must be from 0 to 1", done.stderr)
        self.assertEqual(run(sys.executable, "-m", "corelane.vllm_router", "--worker-startup", "7").returncode, 2)

    @unittest.skipUnless(os.environ.get("REFERENCE_HELP"), "REFERENCE_HELP names no help of vllm-router")
    def test_every_flag_of_vllm_router_is_known_with_its_shape(self) -> None:
        with open(os.environ["REFERENCE_HELP"], encoding="utf-8") as file:
            options = file.read().partition("\noptions:\n")[2]
        words = re.findall(r"^  (--[a-z0-9-]+)(?: (\S.*?))?(?:  |$)", options, re.MULTILINE)
        actions = vllm_router._parser()._option_string_actions
        self.assertGreater(len(words), 60)
        self.assertEqual({flag for flag, _ in words}, set(actions))
        for flag, shape in words:
            takes = "nothing" if not shape else "several" if " ...]" in shape else "one"
            nargs = actions[flag].nargs
            ours = "nothing" if nargs == 0 else "several" if nargs in ("*", "+") else "one"
            self.assertEqual(takes, ours, flag)


if __name__ == "__main__":
    unittest.main()
