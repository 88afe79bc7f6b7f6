"""The protocol between peers: its messages, their checks and their transport; knows no model and no optimizer."""

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec

# gRPC's fork handlers close its poller's descriptors around every subprocess start, and about once in some hundred
# starts the poller then waits on a closed descriptor for ever. We never fork without exec, so we do not need them.
# gRPC reads these variables when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# By itself it writes a raw line to the terminal for each idle connection that the other side closes.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _open_without_content(package: str) -> None:
    """Register a package without running its `__init__`.

    Its modules then import only what they need.
    """
    spec = find_spec(package) if package not in sys.modules else None
    if spec is not None:
        sys.modules[package] = module_from_spec(ModuleSpec(package, None, is_package=True))
        sys.modules[package].__path__ = list(spec.submodule_search_locations or ())


# All of hivemind, including its averagers and experts with scipy, takes half a second and 43 MB to import; we need only
# its DHT and its libp2p client.
_open_without_content("hivemind")
