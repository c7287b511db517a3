"""Starts and stops the router Corelane from Python.

    with corelane.Router(worker_urls=["http://10.0.0.1:8000"], port=0) as router:
        router.wait_ready()
        print(router.url)

The router is a process of its own: the program ``corelane`` that this package brings. Names of arguments are those of
vllm_router's ``Router``, and of Corelane's own flags.
"""

from ._binary import find_binary
from ._router import ConfigError, PolicyType, Router, RouterError

__all__ = ["ConfigError", "PolicyType", "Router", "RouterError", "find_binary"]
