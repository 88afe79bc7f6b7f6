"""What peers say to each other, and how it is checked; knows no model and no optimizer."""

import os

# gRPC's fork handlers close its poller's descriptors around every subprocess that is started, and once in some hundred
# starts the poller then waits on a closed one for ever. We never fork without exec, so they are of no use; gRPC reads
# this when it is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
