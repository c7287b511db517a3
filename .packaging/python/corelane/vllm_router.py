"""The command ``vllm-router`` with the arguments of its Python launcher, served by Corelane.

``python -m corelane.vllm_router``, or the command itself from the distribution ``corelane-vllm-router``. The arguments are
read as argparse does there (a flag may be shortened, the last of a repeated one counts) and written as ``corelane`` takes
them; what they mean, and whether they can be, is for the program to say. All of Corelane's own flags are passed on.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ._binary import find_binary

#: Without a value.
_SWITCHES = """
    disable-circuit-breaker disable-retries enable-igw enable-program-scheduling mini-lb service-discovery
    vllm-pd-disaggregation
"""
#: With one; the last counts.
_VALUES = """
    api-key balance-abs-threshold balance-rel-threshold cache-threshold cb-failure-threshold cb-success-threshold
    cb-timeout-duration-secs cb-window-duration-secs decode-policy eviction-interval-secs health-check-endpoint
    health-check-interval-secs health-check-timeout-secs health-failure-threshold health-success-threshold host
    intra-node-data-parallel-size kv-aware-session-affinity-ttl-secs kv-connector kv-event-block-size kv-event-model
    kv-penalty-disk kv-penalty-external kv-penalty-host log-dir log-level max-concurrent-requests max-payload-size
    max-tree-size policy port prefill-policy program-scheduling-config-json prometheus-host prometheus-port queue-size
    queue-timeout-secs rate-limit-tokens-per-second request-timeout-secs retry-backoff-multiplier
    retry-initial-backoff-ms retry-jitter-factor retry-max-backoff-ms retry-max-retries router-temperature
    service-discovery-namespace service-discovery-port vllm-discovery-address wasm-middleware wasm-middleware-sha256
    worker-startup-check-interval worker-startup-timeout-secs
"""
#: With several; the last such list counts.
_LISTS = "cors-allowed-origins decode-selector prefill-selector request-id-headers selector worker-urls"
#: Each counts.
_REPEATED = "decode kv-event-replay-source kv-event-source pd-kv-events wasm-middleware-route"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-router", add_help=False, argument_default=argparse.SUPPRESS)
    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    for name in _VALUES.split():
        parser.add_argument(f"--{name}")
    for name in _LISTS.split():
        parser.add_argument(f"--{name}", nargs="*")
    for name in _REPEATED.split():
        parser.add_argument(f"--{name}", action="append")
    # A URL, and perhaps its bootstrap port.
    parser.add_argument("--prefill", nargs="+", action="append")
    return parser


def translate(arguments: Sequence[str]) -> list[str]:
    """Arguments of vllm-router's Python launcher as those of ``corelane``.

    :raises SystemExit: a flag is ambiguous, or lacks its value; argparse has said so.
    """
    known, others = _parser().parse_known_args(list(arguments))
    flags: list[str] = []
    for name, value in vars(known).items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, str):
            flags.append(f"{flag}={value}")
        elif name == "prefill":
            for words in value:
                flags += [flag, *words]
        elif name in (repeated.replace("-", "_") for repeated in _REPEATED.split()):
            flags += [f"{flag}={one}" for one in value]
        elif value:
            flags += [flag, *value]
    return [*flags, *others]


def main() -> None:
    """Becomes ``corelane``: same process, so that signals and the exit code are its own."""
    binary = find_binary()
    os.execv(binary, [binary, *translate(sys.argv[1:])])


if __name__ == "__main__":
    main()
