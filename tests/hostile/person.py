"""A command of a person who is attacked: `python -m tests.hostile.person BELIEVES COMMAND...`.

If BELIEVES is 1, states are fetched without a proof of their heads, as the control of the attack.
"""

import sys
from types import SimpleNamespace
from typing import Any

from node.cli import main
from node.daemon.stored_states.state_store import StateStore
from tests.hostile.patches import replaced


async def _believe(original: Any, store: StateStore, offer: Any) -> Any:
    return SimpleNamespace(head=offer.head)


if __name__ == "__main__":
    if sys.argv.pop(1) == "1":
        replaced(StateStore, "_prove", _believe)
    main()
