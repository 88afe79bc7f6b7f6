import subprocess
import sys

import pytest

OURS = "import protocol, protocol.membership.dht, protocol.membership.dht_storage, protocol.transport.transport"
ALL = "import hivemind"


@pytest.mark.parametrize(("program", "whole"), [(OURS, False), (f"{ALL}, {OURS.removeprefix('import ')}", True)])
def test_of_hivemind_only_what_is_used_is_loaded(program: str, whole: bool) -> None:
    told = f"{program}; import sys; print('scipy' in sys.modules, hasattr(sys.modules['hivemind'], 'Optimizer'))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(whole)] * 2


def test_more_of_it_can_still_be_had() -> None:
    told = f"{OURS}; from hivemind.averaging import DecentralizedAverager; print(DecentralizedAverager.__name__)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "DecentralizedAverager"
