"""A status that does not change by itself."""

from node.monitoring.status import NodeStatus


class FixedStatus:
    def __init__(self, current: NodeStatus) -> None:
        self.current = current

    def status(self) -> NodeStatus:
        return self.current
