"""All attacks by name: who attacks, which rules hold them off, and what they count."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.switches import Switches


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack on a live swarm.

    Args:
        row: the row of the list of attacks, or the threats, that it stands for.
        stranger: the program of the attacker, `module:function` in this folder; empty for a hostile node.
        switch: of the hostile node; empty: the name of the attack.
        member: whether the attacker is a node that trains with the honest ones until its switch is on.
        rules: the rules that hold it off, which the control switches off in the honest peers.
        counters: each of them may count the attack; one has to.
        min_pace: of the honest, compared with their pace before; less for floods, because the machine's own work for
            the attacker's connections takes processor time from the trainers on the same two cores.
        limits: what the attacker measures may be at most this.
        seconds: of the attack.
        changes: tables of the manifest.
        options: of the attacker's program.
        is_local: whether it attacks a person who starts a node, not the running ones.
        stages: of the pipeline that it attacks; 0 if each honest peer has the whole model.
        stage: of the hostile node in a pipeline.
    """

    name: str
    row: str
    stranger: str = ""
    switch: str = ""
    member: bool = False
    rules: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    min_pace: float = 0.9
    limits: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 6.0
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_local: bool = False
    stages: int = 0
    stage: int = 0

    @property
    def niceness(self) -> int:
        """Return the niceness of its strangers: those that send a few calls a second must not starve."""
        return 0 if self.stages or self.is_local else NICE

    def is_counted(self, risen: Mapping[str, int]) -> bool:
        """Return whether one of its counters has risen; a refusal of a whole manifest is an error for the person."""
        return self.is_local or any(risen.get(name, 0) for name in self.counters)


NICE = 19  # of floods: they must not win by processor time
TRIMMED = {"method": {"aggregate": {"kind": "trimmed-mean"}}}
GATHER = {"method": {"topology": {"kind": "gather"}}}
FLOODED_PACE = 0.5
STAGES = 2
PIPELINE_PACE = 0.8
PIPELINE: Mapping[str, Mapping[str, Any]] = {
    "model": {"layers": STAGES, "tied": False},
    "method": {"recipe": "frugal", "schedule": {"inner_steps": 2}},
    "pipeline": {"stages": STAGES, "microbatch": 2, "in_flight": 4, "activations": "fp32", "memory": 1 << 22},
}
EXACT: Mapping[str, Mapping[str, Any]] = {
    "model": PIPELINE["model"],
    "method": {"recipe": "data-parallel", "schedule": {"inner_steps": 1}},
    "pipeline": {**PIPELINE["pipeline"], "mode": "exact"},
}
VOID_STEPS = 3.0  # of four peers together
AUDITED = {**EXACT, "pipeline": {**EXACT["pipeline"], "audit_share": 0.5}}
OWN_SHARE = 0.4  # of one: the attacker gets nothing of it, not even once
KNOCKS = 40.0  # of 3 peers at 12 addresses: in this laboratory they may dial loopback, and try each address once
LOG_BYTES = 60_000.0  # of three peers; honest rounds write 5 kB
CHAIN_ANSWERS = 100.0
TARGET_TOKENS = 10**12

ATTACKS = {
    attack.name: attack
    for attack in (
        Attack(
            name="invented-history", row="1", stranger="history:invented_history", rules=("certificates",),
            counters=("setbacks: not certified",),
        ),
        Attack(
            name="history-at-the-limit", row="1b", stranger="history:history_at_the_limit", rules=("certificates",),
            counters=("setbacks: not certified",),
        ),
        Attack(
            name="noise-in-number-slots", row="1c", stranger="history:noise_in_number_slots", rules=("certificates",),
            counters=("setbacks: not certified",),
        ),
        Attack(
            name="invented-commits", row="1d", stranger="history:invented_commits", rules=("certificates",),
            counters=("setbacks: not certified",),
        ),
        Attack(
            # Rosters wait for it as for a slow newcomer: for 6 seconds, and a twentieth of the time from then on.
            name="state-vote", row="2", stranger="history:state_vote", seconds=12.0,
            counters=("refusals: not dialled", "setbacks: not certified"),
        ),
        Attack(name="invented-sums", row="3", member=True, seconds=14.0, counters=("refusals: forged",)),
        Attack(
            name="invented-contributors", row="4", member=True, rules=("known-contributors",),
            counters=("refusals: forged", "refusals: false proposal", "refusals: unknown contributor"),
        ),
        Attack(name="lying-reducer", row="5", member=True, counters=("refusals: wrong sum",)),
        Attack(name="lying-reducer-trimmed", row="5", member=True, switch="lying-reducer", changes=TRIMMED,
            counters=("refusals: wrong sum",)),
        Attack(
            name="token-claim", row="6", member=True, rules=("bounded-tokens",), counters=("refusals: limit",),
        ),
        Attack(
            name="token-claim-at-target", row="6b", member=True, switch="token-claim", rules=("bounded-tokens",),
            counters=("refusals: limit",), changes={"target": {"tokens": TARGET_TOKENS}},
        ),
        Attack(name="huge-message", row="6c", member=True, counters=("refusals: too large",)),
        Attack(name="ghost-sum", row="7", member=True, seconds=8.0, counters=("refusals: wrong sum",)),
        Attack(
            name="announce-only", row="8", stranger="crowd:announce_only", rules=("confirmed-keys",),
            counters=("refusals: newcomer", "refusals: not dialled"),
        ),
        Attack(
            name="announce-two", row="8", stranger="crowd:announce_only", rules=("confirmed-keys",),
            counters=("refusals: not dialled",),
            options={"keys": 2},
        ),
        Attack(
            name="lying-clocks", row="9", stranger="crowd:lying_clocks",
            counters=("refusals: stale", "refusals: not dialled"), seconds=8.0,
        ),
        Attack(
            name="two-decisions", row="10", member=True, changes=GATHER, seconds=10.0, counters=("refusals: proved",),
        ),
        Attack(
            name="fresh-keys", row="11", stranger="crowd:fresh_keys", rules=("newcomer-quota",),
            counters=("refusals: newcomer", "refusals: limit"), min_pace=FLOODED_PACE,
        ),
        Attack(
            name="ghost-contribution", row="12", member=True,
            counters=("refusals: not served",),
        ),
        Attack(name="garbled-contribution", row="12", member=True, counters=("refusals: does not decode",)),
        Attack(
            name="oversized-manifest", row="13", stranger="manifests:oversized_manifest", rules=("room",),
            limits={"gigabytes": 1.0}, is_local=True, seconds=3.0,
        ),
        Attack(
            name="extreme-manifest", row="13b", stranger="manifests:extreme_manifest", rules=("manifest-bounds",),
            limits={"accepted": 0.4}, is_local=True, seconds=1.0,
        ),
        Attack(
            name="knocking", row="14", stranger="crowd:knocking", counters=("refusals: not dialled",),
            limits={"knocks": KNOCKS},
        ),
        Attack(
            name="log-flood", row="15", stranger="crowd:log_flood", rules=("call-guard", "log-limit"),
            counters=("refusals: stale", "refusals: limit"), min_pace=FLOODED_PACE, limits={"log_bytes": LOG_BYTES},
        ),
        Attack(
            name="chain-flood", row="15", stranger="crowd:chain_flood", rules=("call-guard",),
            counters=("refusals: limit",), min_pace=FLOODED_PACE, limits={"answers": CHAIN_ANSWERS},
        ),
        Attack(
            name="leader-drops-others", row="16", member=True, seconds=10.0,
            counters=("refusals: left out", "refusals: late", "refusals: smaller roster"),
        ),
        Attack(name="two-contributions", row="17", member=True, counters=("refusals: equivocation",)),
        Attack(
            name="exported-model", row="A", stranger="models:exported_model", rules=("proof",), is_local=True,
            limits={"foreign": OWN_SHARE}, seconds=1.0, options={"keys": 2},
        ),
        Attack(
            name="exported-model-of-six", row="A", stranger="models:exported_model", rules=("proof",), is_local=True,
            limits={"foreign": OWN_SHARE}, seconds=1.0, options={"keys": 6},
        ),
        Attack(
            name="other-inputs", row="B", stranger="tasks:other_inputs", rules=("hostile-tasks",), stages=STAGES,
            changes=PIPELINE, min_pace=PIPELINE_PACE, counters=("refusals: malformed",), seconds=10.0,
        ),
        Attack(
            name="withheld-backwards", row="C", stranger="tasks:withheld_backwards", rules=("own-deadlines",),
            stages=STAGES, changes=PIPELINE, min_pace=PIPELINE_PACE, seconds=14.0,
            counters=("microbatches: served: left behind", "microbatches: served: turned away"),
        ),
        Attack(
            name="void-records", row="D", stranger="steps:void_records", rules=("certified-decisions",), stages=STAGES,
            changes=EXACT, min_pace=PIPELINE_PACE, seconds=10.0, counters=("refusals: not dialled",),
            limits={"void": VOID_STEPS},
        ),
        Attack(
            name="announced-owners", row="D", stranger="steps:announced_owners", rules=("owners-with-standing",),
            stages=STAGES, changes=EXACT, min_pace=PIPELINE_PACE, seconds=40.0, options={"keys": 3},
            counters=("refusals: not dialled",),
        ),
        Attack(
            name="false-activations", row="G", member=True, rules=("audited-results",), stages=STAGES, changes=AUDITED,
            min_pace=0.5, seconds=20.0, limits={"trusted": OWN_SHARE}, counters=("refusals: contradicted",),
        ),
        Attack(
            name="false-gradients", row="G", member=True, rules=("audited-results",), stages=STAGES, stage=1,
            changes=AUDITED, min_pace=0.5, seconds=20.0, limits={"trusted": OWN_SHARE},
            counters=("refusals: contradicted",),
        ),
        Attack(
            name="invented-gradients", row="F", stranger="tasks:invented_gradients", rules=("forward-first",),
            stages=STAGES, changes=PIPELINE, min_pace=PIPELINE_PACE, seconds=10.0, limits={"added": OWN_SHARE},
            counters=("microbatches: served: without forward",),
        ),
    )
}  # fmt: skip


def install_members(switches: Switches) -> None:
    """Replace the methods that the attacks of hostile nodes replace; each does so while its switch is on."""
    from tests.hostile.attackers.equivocation import Equivocator
    from tests.hostile.attackers.members import Liar

    Liar(switches)
    Equivocator(switches)
