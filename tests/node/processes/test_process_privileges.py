"""The privileges of a node and of the processes that it starts."""

import subprocess
import sys

PROGRAM = """
import resource, subprocess
from node.processes.process import give_up_privileges
{first}
print(resource.getrlimit(resource.RLIMIT_CORE)[1])
subprocess.run(["grep", "NoNewPrivs", "/proc/self/status"])
"""


def limits_of_child(first: str) -> list[str]:
    command = [sys.executable, "-u", "-c", PROGRAM.format(first=first)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_node_and_its_children_gain_no_privileges_and_dump_no_core() -> None:
    assert limits_of_child("give_up_privileges()") == ["0", "NoNewPrivs:", "1"]
    assert limits_of_child("") != ["0", "NoNewPrivs:", "1"]  # the control
