import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

USED_IMPORTS = "import protocol, protocol.membership.dht, protocol.membership.dht_storage, protocol.transport.transport"
WHOLE_PACKAGE = "import hivemind"


@pytest.mark.parametrize(
    ("program", "is_complete"),
    [(USED_IMPORTS, False), (f"{WHOLE_PACKAGE}, {USED_IMPORTS.removeprefix('import ')}", True)],
)
def test_only_the_used_parts_of_hivemind_are_loaded(program: str, is_complete: bool) -> None:
    code = f"{program}; import sys; print('scipy' in sys.modules, hasattr(sys.modules['hivemind'], 'Optimizer'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(is_complete)] * 2


def test_other_parts_of_hivemind_can_still_be_imported() -> None:
    code = (
        f"{USED_IMPORTS}; from hivemind.averaging import DecentralizedAverager; print(DecentralizedAverager.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "DecentralizedAverager"
