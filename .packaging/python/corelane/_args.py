"""Arguments of ``Router`` as the program's flags."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

#: Names of vllm_router's constructor that are others than those of its flags.
_FLAGS = {
    "decode_urls": "decode",
    "prefill_urls": "prefill",
    "wasm_middleware_routes": "wasm_middleware_route",
}
#: Given to the program by environment: flags show in the list of processes.
_SECRETS = frozenset({"api_key", "client_api_key", "admin_api_key", "prefix_hash_seed"})


def command_line(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Flags, and variables of the environment, that say the same. What is ``None``, ``False`` or empty is not said."""
    flags: list[str] = []
    environment: dict[str, str] = {}
    for name, value in settings.items():
        name = _FLAGS.get(name, name)
        if value is None or value is False:
            continue
        if name in _SECRETS:
            environment["CORELANE_" + name.upper()] = str(value)
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif name == "prefill":
            for words in _prefill(value):
                flags += [flag, *words]
        elif isinstance(value, Mapping):
            flags += _list(flag, (f"{key}={text}" for key, text in value.items()))
        elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, enum.Enum)):
            flags += _list(flag, map(_text, value))
        else:
            # One word, so that a value that begins with a dash is no flag.
            flags.append(f"{flag}={_text(value)}")
    return flags, environment


def of_args(args: Any) -> dict[str, Any]:
    """The settings in an object like vllm_router's ``RouterArgs``, or a namespace of argparse."""
    settings = dict(vars(args))
    if dataclasses.is_dataclass(args):
        # What was left as it is need not be said, so that a field that means nothing here is in nobody's way.
        for field in dataclasses.fields(args):
            if field.name in settings and settings[field.name] == _default(field):
                del settings[field.name]
    if settings.get("vllm_pd_disaggregation") or settings.get("service_discovery"):
        settings.pop("worker_urls", None)
    if not settings.get("vllm_pd_disaggregation"):
        for name in ("prefill_urls", "decode_urls", "prefill", "decode"):
            settings.pop(name, None)
    return settings


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _list(flag: str, values: Iterable[str]) -> list[str]:
    values = list(values)
    return [flag, *values] if values else []


def _prefill(workers: Iterable[Any]) -> Iterable[list[str]]:
    """A URL, or a pair of a URL and its bootstrap port (``None``: it has none)."""
    for worker in workers:
        if isinstance(worker, str):
            yield [worker]
        else:
            url, *port = worker
            yield [url, *("none" if p is None else str(p) for p in port)]


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if type(value).__name__ == "PolicyType":
        # vllm_router's own, which is no enum of Python: PolicyType.CacheAware.
        return re.sub(r"(?<!^)(?=[A-Z])", "_", str(value).rpartition(".")[2]).lower()
    return str(value)
