"""What peers say to each other, and how it is checked; knows no model and no optimizer."""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec

# gRPC's fork handlers close its poller's descriptors around every subprocess that is started, and once in some hundred
# starts the poller then waits on a closed one for ever. We never fork without exec, so they are of no use; gRPC reads
# this when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _open_without_content(package: str) -> None:
    """Let modules of a package be imported without what the package itself imports."""
    found = find_spec(package) if package not in sys.modules else None
    if found is not None:
        sys.modules[package] = module_from_spec(ModuleSpec(package, None, is_package=True))
        sys.modules[package].__path__ = list(found.submodule_search_locations or ())


# All of hivemind, its averagers and experts with scipy behind them, takes half a second and 43 MB; we need its DHT and
# its way to libp2p.
_open_without_content("hivemind")
