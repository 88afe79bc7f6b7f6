"""Pipelines on limited links between network namespaces, compared with the prediction of `murmur plan`."""

from dataclasses import replace

from benchmarks.pipelining.swarm import Setting, Swarm, Window
from node.commands.capacity import workload_of
from node.commands.plan.arithmetic import predict
from node.commands.plan.peers import PeerKind
from protocol.manifest.run import Manifest
from tests.netlab.lab.laboratory import Laboratory, Link

RTT_SECONDS = 0.05
OPERATIONS = 1e12  # of a microbatch at each stage; only the ratio to the speed of a peer matters


def predicted_fraction(setting: Setting, mbit: int) -> float:
    """Return the predicted fraction of the ideal of peers that are equally fast, without rounds.

    A trainer that sleeps takes as long at each stage, so all stages count as one trillion operations.
    """
    work = workload_of(Manifest.model_validate(setting.manifest()))
    stages = tuple(replace(stage, flops=OPERATIONS, memory=dict.fromkeys(stage.memory, 0.0)) for stage in work.stages)
    (rate,) = {rate for rates in setting.rates for rate in rates}
    values = {"name": "peer", "count": sum(map(len, setting.rates)), "tflops": rate, "memory": "8GB"}
    links = {"up": f"{mbit}mbit", "down": f"{mbit}mbit", "rtt": 1000 * RTT_SECONDS}
    found = predict(replace(work, stages=stages), [PeerKind.model_validate(values | links)])
    return found.links * found.stages * found.window.fraction * found.step


def measure_window(setting: Setting, mbit: int, warm: float, seconds: float) -> Window:
    """Run a pipeline on limited links; needs root, iproute2, nftables and iptables."""
    link = Link(up=mbit, down=mbit, delay=RTT_SECONDS / 2)  # at each end
    with Laboratory() as laboratory, Swarm(setting, laboratory, link) as swarm:
        swarm.start()
        swarm.measure(warm)
        return swarm.measure(seconds)
