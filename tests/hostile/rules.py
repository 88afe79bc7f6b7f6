"""The rules of honest peers that a control turns off, by name."""

from tests.hostile.switches import Switches


def install_rules(switches: Switches) -> None:
    """Make each rule yield while its switch is on."""
