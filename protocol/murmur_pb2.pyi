from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Signed(_message.Message):
    __slots__ = ("kind", "peer", "body", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    peer: str
    body: bytes
    signature: bytes
    def __init__(self, kind: _Optional[str] = ..., peer: _Optional[str] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class BlobRef(_message.Message):
    __slots__ = ("digest", "size")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    size: int
    def __init__(self, digest: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class PeerRecord(_message.Message):
    __slots__ = ("sequence", "expires", "addresses", "role", "device", "name", "version", "round", "step", "digest", "state_digest", "chain_tokens", "tokens", "loss", "tokens_per_second", "bytes_sent", "leaving", "validation_loss", "validation_round", "compute_seconds", "exchange_seconds", "wait_seconds", "resting", "bytes_carried", "direct_port", "learning_rate", "gradient_norm", "device_use", "device_memory", "device_memory_total", "bytes_received", "start", "other_start", "revision", "ticket", "stage", "stage_life", "stage_rate", "microbatches_done", "microbatches_torn", "microbatches_lost", "microbatches_replayed", "microbatches_dropped", "kept", "step_decided", "more_stages", "stage_move", "reward", "rollouts", "validation_by_source")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    BYTES_CARRIED_FIELD_NUMBER: _ClassVar[int]
    DIRECT_PORT_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OTHER_START_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_LIFE_FIELD_NUMBER: _ClassVar[int]
    STAGE_RATE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_DONE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_TORN_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_LOST_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STEP_DECIDED_FIELD_NUMBER: _ClassVar[int]
    MORE_STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGE_MOVE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    expires: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    role: str
    device: str
    name: str
    version: str
    round: int
    step: int
    digest: bytes
    state_digest: bytes
    chain_tokens: int
    tokens: int
    loss: float
    tokens_per_second: float
    bytes_sent: int
    leaving: bool
    validation_loss: float
    validation_round: int
    compute_seconds: float
    exchange_seconds: float
    wait_seconds: float
    resting: bool
    bytes_carried: int
    direct_port: int
    learning_rate: float
    gradient_norm: float
    device_use: float
    device_memory: int
    device_memory_total: int
    bytes_received: int
    start: int
    other_start: int
    revision: bytes
    ticket: bytes
    stage: int
    stage_life: int
    stage_rate: float
    microbatches_done: int
    microbatches_torn: int
    microbatches_lost: int
    microbatches_replayed: int
    microbatches_dropped: int
    kept: bytes
    step_decided: int
    more_stages: bytes
    stage_move: int
    reward: float
    rollouts: int
    validation_by_source: bytes
    def __init__(self, sequence: _Optional[int] = ..., expires: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ..., role: _Optional[str] = ..., device: _Optional[str] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., round: _Optional[int] = ..., step: _Optional[int] = ..., digest: _Optional[bytes] = ..., state_digest: _Optional[bytes] = ..., chain_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., loss: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., leaving: _Optional[bool] = ..., validation_loss: _Optional[float] = ..., validation_round: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., exchange_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., resting: _Optional[bool] = ..., bytes_carried: _Optional[int] = ..., direct_port: _Optional[int] = ..., learning_rate: _Optional[float] = ..., gradient_norm: _Optional[float] = ..., device_use: _Optional[float] = ..., device_memory: _Optional[int] = ..., device_memory_total: _Optional[int] = ..., bytes_received: _Optional[int] = ..., start: _Optional[int] = ..., other_start: _Optional[int] = ..., revision: _Optional[bytes] = ..., ticket: _Optional[bytes] = ..., stage: _Optional[int] = ..., stage_life: _Optional[int] = ..., stage_rate: _Optional[float] = ..., microbatches_done: _Optional[int] = ..., microbatches_torn: _Optional[int] = ..., microbatches_lost: _Optional[int] = ..., microbatches_replayed: _Optional[int] = ..., microbatches_dropped: _Optional[int] = ..., kept: _Optional[bytes] = ..., step_decided: _Optional[int] = ..., more_stages: _Optional[bytes] = ..., stage_move: _Optional[int] = ..., reward: _Optional[float] = ..., rollouts: _Optional[int] = ..., validation_by_source: _Optional[bytes] = ...) -> None: ...

class ServedStages(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[ServedStage]
    def __init__(self, stages: _Optional[_Iterable[_Union[ServedStage, _Mapping]]] = ...) -> None: ...

class ServedStage(_message.Message):
    __slots__ = ("stage", "stage_life", "stage_rate", "round", "digest", "chain_tokens", "state_digest")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_LIFE_FIELD_NUMBER: _ClassVar[int]
    STAGE_RATE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage: int
    stage_life: int
    stage_rate: float
    round: int
    digest: bytes
    chain_tokens: int
    state_digest: bytes
    def __init__(self, stage: _Optional[int] = ..., stage_life: _Optional[int] = ..., stage_rate: _Optional[float] = ..., round: _Optional[int] = ..., digest: _Optional[bytes] = ..., chain_tokens: _Optional[int] = ..., state_digest: _Optional[bytes] = ...) -> None: ...

class KeptStates(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[KeptState]
    def __init__(self, states: _Optional[_Iterable[_Union[KeptState, _Mapping]]] = ...) -> None: ...

class KeptState(_message.Message):
    __slots__ = ("stage", "round", "digest", "chain_tokens", "state_digest")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage: int
    round: int
    digest: bytes
    chain_tokens: int
    state_digest: bytes
    def __init__(self, stage: _Optional[int] = ..., round: _Optional[int] = ..., digest: _Optional[bytes] = ..., chain_tokens: _Optional[int] = ..., state_digest: _Optional[bytes] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("round", "age", "base", "codec", "shapes", "tokens", "steps", "loss", "parts", "work", "ticket", "ledger", "seal", "secret", "credits")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    round: int
    age: int
    base: bytes
    codec: str
    shapes: bytes
    tokens: int
    steps: int
    loss: float
    parts: _containers.RepeatedCompositeFieldContainer[BlobRef]
    work: BlobRef
    ticket: Signed
    ledger: bytes
    seal: bytes
    secret: bytes
    credits: _containers.RepeatedCompositeFieldContainer[RolloutCredit]
    def __init__(self, round: _Optional[int] = ..., age: _Optional[int] = ..., base: _Optional[bytes] = ..., codec: _Optional[str] = ..., shapes: _Optional[bytes] = ..., tokens: _Optional[int] = ..., steps: _Optional[int] = ..., loss: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., work: _Optional[_Union[BlobRef, _Mapping]] = ..., ticket: _Optional[_Union[Signed, _Mapping]] = ..., ledger: _Optional[bytes] = ..., seal: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., credits: _Optional[_Iterable[_Union[RolloutCredit, _Mapping]]] = ...) -> None: ...

class RolloutCredit(_message.Message):
    __slots__ = ("maker", "groups", "tokens")
    MAKER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    maker: str
    groups: int
    tokens: int
    def __init__(self, maker: _Optional[str] = ..., groups: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("round", "view", "base", "contributions")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    base: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., base: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("round", "view", "roster", "blobs", "lock")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    roster: bytes
    blobs: _containers.RepeatedScalarFieldContainer[bytes]
    lock: bytes
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., roster: _Optional[bytes] = ..., blobs: _Optional[_Iterable[bytes]] = ..., lock: _Optional[bytes] = ...) -> None: ...

class Inclusion(_message.Message):
    __slots__ = ("round", "view", "roster", "attempt", "included", "reducers")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INCLUDED_FIELD_NUMBER: _ClassVar[int]
    REDUCERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    roster: bytes
    attempt: int
    included: _containers.RepeatedScalarFieldContainer[str]
    reducers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., roster: _Optional[bytes] = ..., attempt: _Optional[int] = ..., included: _Optional[_Iterable[str]] = ..., reducers: _Optional[_Iterable[str]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("round", "view", "roster", "attempt", "part", "blob", "inputs")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    roster: bytes
    attempt: int
    part: int
    blob: BlobRef
    inputs: bytes
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., roster: _Optional[bytes] = ..., attempt: _Optional[int] = ..., part: _Optional[int] = ..., blob: _Optional[_Union[BlobRef, _Mapping]] = ..., inputs: _Optional[bytes] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("view", "roster", "attempt", "peers", "slots", "signatures")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    view: int
    roster: bytes
    attempt: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedScalarFieldContainer[int]
    signatures: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, view: _Optional[int] = ..., roster: _Optional[bytes] = ..., attempt: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[int]] = ..., signatures: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "view", "base", "contributions", "parts", "left_out", "revision", "revisions", "evidence")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    base: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Signed]
    parts: _containers.RepeatedCompositeFieldContainer[BlobRef]
    left_out: _containers.RepeatedScalarFieldContainer[str]
    revision: bytes
    revisions: _containers.RepeatedCompositeFieldContainer[Signed]
    evidence: Evidence
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., base: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[BlobRef, _Mapping]]] = ..., left_out: _Optional[_Iterable[str]] = ..., revision: _Optional[bytes] = ..., revisions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("statements",)
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    statements: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, statements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class Revision(_message.Message):
    __slots__ = ("number", "previous", "from_round", "changes", "time")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    number: int
    previous: bytes
    from_round: int
    changes: str
    time: float
    def __init__(self, number: _Optional[int] = ..., previous: _Optional[bytes] = ..., from_round: _Optional[int] = ..., changes: _Optional[str] = ..., time: _Optional[float] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("key", "until", "note")
    KEY_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    key: str
    until: float
    note: str
    def __init__(self, key: _Optional[str] = ..., until: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class Acknowledgement(_message.Message):
    __slots__ = ("round", "view", "proposal", "state", "voters", "tokens", "content", "confirms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMS_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    proposal: bytes
    state: bytes
    voters: bytes
    tokens: int
    content: bytes
    confirms: bool
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., proposal: _Optional[bytes] = ..., state: _Optional[bytes] = ..., voters: _Optional[bytes] = ..., tokens: _Optional[int] = ..., content: _Optional[bytes] = ..., confirms: _Optional[bool] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("round", "view", "proposal", "peers", "signatures", "state", "voters", "tokens", "content", "confirms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMS_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    proposal: bytes
    peers: _containers.RepeatedScalarFieldContainer[str]
    signatures: _containers.RepeatedScalarFieldContainer[bytes]
    state: bytes
    voters: bytes
    tokens: int
    content: bytes
    confirms: bool
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., proposal: _Optional[bytes] = ..., peers: _Optional[_Iterable[str]] = ..., signatures: _Optional[_Iterable[bytes]] = ..., state: _Optional[bytes] = ..., voters: _Optional[bytes] = ..., tokens: _Optional[int] = ..., content: _Optional[bytes] = ..., confirms: _Optional[bool] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("proposal", "view", "content")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    proposal: bytes
    view: int
    content: bytes
    def __init__(self, proposal: _Optional[bytes] = ..., view: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("round", "view", "roster", "acknowledged", "confirmed")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    round: int
    view: int
    roster: bytes
    acknowledged: Vote
    confirmed: Vote
    def __init__(self, round: _Optional[int] = ..., view: _Optional[int] = ..., roster: _Optional[bytes] = ..., acknowledged: _Optional[_Union[Vote, _Mapping]] = ..., confirmed: _Optional[_Union[Vote, _Mapping]] = ...) -> None: ...

class Justification(_message.Message):
    __slots__ = ("round", "base", "view", "roster", "proposal", "tolerated", "promises", "certificate")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TOLERATED_FIELD_NUMBER: _ClassVar[int]
    PROMISES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    round: int
    base: bytes
    view: int
    roster: bytes
    proposal: bytes
    tolerated: int
    promises: _containers.RepeatedCompositeFieldContainer[Signed]
    certificate: Decision
    def __init__(self, round: _Optional[int] = ..., base: _Optional[bytes] = ..., view: _Optional[int] = ..., roster: _Optional[bytes] = ..., proposal: _Optional[bytes] = ..., tolerated: _Optional[int] = ..., promises: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., certificate: _Optional[_Union[Decision, _Mapping]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("round", "chain", "audited", "contribution", "verdict")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    round: int
    chain: bytes
    audited: str
    contribution: bytes
    verdict: int
    def __init__(self, round: _Optional[int] = ..., chain: _Optional[bytes] = ..., audited: _Optional[str] = ..., contribution: _Optional[bytes] = ..., verdict: _Optional[int] = ...) -> None: ...

class PublicRun(_message.Message):
    __slots__ = ("run", "expires", "name", "recipe", "parameters", "peers", "round", "target_rounds", "tokens", "target_tokens", "link", "organiser", "voucher")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TARGET_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ORGANISER_FIELD_NUMBER: _ClassVar[int]
    VOUCHER_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    expires: float
    name: str
    recipe: str
    parameters: int
    peers: int
    round: int
    target_rounds: int
    tokens: int
    target_tokens: int
    link: str
    organiser: str
    voucher: bytes
    def __init__(self, run: _Optional[bytes] = ..., expires: _Optional[float] = ..., name: _Optional[str] = ..., recipe: _Optional[str] = ..., parameters: _Optional[int] = ..., peers: _Optional[int] = ..., round: _Optional[int] = ..., target_rounds: _Optional[int] = ..., tokens: _Optional[int] = ..., target_tokens: _Optional[int] = ..., link: _Optional[str] = ..., organiser: _Optional[str] = ..., voucher: _Optional[bytes] = ...) -> None: ...

class RecordUpdate(_message.Message):
    __slots__ = ("name", "base", "fields", "cleared", "signature")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    base: int
    fields: PeerRecord
    cleared: _containers.RepeatedScalarFieldContainer[int]
    signature: bytes
    def __init__(self, name: _Optional[bytes] = ..., base: _Optional[int] = ..., fields: _Optional[_Union[PeerRecord, _Mapping]] = ..., cleared: _Optional[_Iterable[int]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class GossipRequest(_message.Message):
    __slots__ = ("run", "time", "known", "records", "salt", "updates")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    time: float
    known: bytes
    records: _containers.RepeatedCompositeFieldContainer[Signed]
    salt: bytes
    updates: _containers.RepeatedCompositeFieldContainer[RecordUpdate]
    def __init__(self, run: _Optional[bytes] = ..., time: _Optional[float] = ..., known: _Optional[bytes] = ..., records: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., salt: _Optional[bytes] = ..., updates: _Optional[_Iterable[_Union[RecordUpdate, _Mapping]]] = ...) -> None: ...

class GossipReply(_message.Message):
    __slots__ = ("time", "records", "wanted", "updates", "counts_caller")
    TIME_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_CALLER_FIELD_NUMBER: _ClassVar[int]
    time: float
    records: _containers.RepeatedCompositeFieldContainer[Signed]
    wanted: bytes
    updates: _containers.RepeatedCompositeFieldContainer[RecordUpdate]
    counts_caller: bool
    def __init__(self, time: _Optional[float] = ..., records: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., wanted: _Optional[bytes] = ..., updates: _Optional[_Iterable[_Union[RecordUpdate, _Mapping]]] = ..., counts_caller: _Optional[bool] = ...) -> None: ...

class Brief(_message.Message):
    __slots__ = ("kind", "peer", "body", "signature", "references", "bits")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    peer: str
    body: bytes
    signature: bytes
    references: bytes
    bits: bytes
    def __init__(self, kind: _Optional[str] = ..., peer: _Optional[str] = ..., body: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., references: _Optional[bytes] = ..., bits: _Optional[bytes] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("run", "statements", "briefs")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    BRIEFS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    statements: _containers.RepeatedCompositeFieldContainer[Signed]
    briefs: _containers.RepeatedCompositeFieldContainer[Brief]
    def __init__(self, run: _Optional[bytes] = ..., statements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., briefs: _Optional[_Iterable[_Union[Brief, _Mapping]]] = ...) -> None: ...

class DeliverReply(_message.Message):
    __slots__ = ("statements", "unresolved")
    STATEMENTS_FIELD_NUMBER: _ClassVar[int]
    UNRESOLVED_FIELD_NUMBER: _ClassVar[int]
    statements: _containers.RepeatedCompositeFieldContainer[Signed]
    unresolved: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, statements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., unresolved: _Optional[_Iterable[int]] = ...) -> None: ...

class ChainRequest(_message.Message):
    __slots__ = ("run", "after_round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    after_round: int
    def __init__(self, run: _Optional[bytes] = ..., after_round: _Optional[int] = ...) -> None: ...

class ChainLog(_message.Message):
    __slots__ = ("electorate", "commits", "certificates")
    ELECTORATE_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    electorate: bytes
    commits: _containers.RepeatedCompositeFieldContainer[Signed]
    certificates: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, electorate: _Optional[bytes] = ..., commits: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., certificates: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class ChainReply(_message.Message):
    __slots__ = ("log", "round", "digest", "chain_tokens", "state", "revision", "revisions", "decided")
    LOG_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    log: ChainLog
    round: int
    digest: bytes
    chain_tokens: int
    state: BlobRef
    revision: bytes
    revisions: _containers.RepeatedCompositeFieldContainer[Signed]
    decided: ChainLog
    def __init__(self, log: _Optional[_Union[ChainLog, _Mapping]] = ..., round: _Optional[int] = ..., digest: _Optional[bytes] = ..., chain_tokens: _Optional[int] = ..., state: _Optional[_Union[BlobRef, _Mapping]] = ..., revision: _Optional[bytes] = ..., revisions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., decided: _Optional[_Union[ChainLog, _Mapping]] = ...) -> None: ...

class PiecesRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    def __init__(self, digest: _Optional[bytes] = ...) -> None: ...

class PiecesReply(_message.Message):
    __slots__ = ("size", "pieces")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    size: int
    pieces: bytes
    def __init__(self, size: _Optional[int] = ..., pieces: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digest", "offset", "length", "squeezed")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SQUEEZED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    length: int
    squeezed: bool
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., squeezed: _Optional[bool] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "squeezed")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SQUEEZED_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    squeezed: int
    def __init__(self, data: _Optional[bytes] = ..., squeezed: _Optional[int] = ...) -> None: ...

class HeldBlob(_message.Message):
    __slots__ = ("blob", "holder", "result")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    blob: BlobRef
    holder: str
    result: Signed
    def __init__(self, blob: _Optional[_Union[BlobRef, _Mapping]] = ..., holder: _Optional[str] = ..., result: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class StageResult(_message.Message):
    __slots__ = ("round", "base", "backward", "activation", "tokens", "gradient", "result", "loss", "kind")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    round: int
    base: bytes
    backward: bool
    activation: bytes
    tokens: bytes
    gradient: bytes
    result: BlobRef
    loss: float
    kind: str
    def __init__(self, round: _Optional[int] = ..., base: _Optional[bytes] = ..., backward: _Optional[bool] = ..., activation: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., gradient: _Optional[bytes] = ..., result: _Optional[_Union[BlobRef, _Mapping]] = ..., loss: _Optional[float] = ..., kind: _Optional[str] = ...) -> None: ...

class Contradiction(_message.Message):
    __slots__ = ("run", "results")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    results: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, run: _Optional[bytes] = ..., results: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class ContradictReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageTask(_message.Message):
    __slots__ = ("run", "serial", "backward", "attempt", "life", "round", "replay", "activation", "tokens", "gradient", "deadline_ms", "loss", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    serial: int
    backward: bool
    attempt: int
    life: int
    round: int
    replay: bool
    activation: HeldBlob
    tokens: HeldBlob
    gradient: HeldBlob
    deadline_ms: int
    loss: float
    number: int
    def __init__(self, run: _Optional[bytes] = ..., serial: _Optional[int] = ..., backward: _Optional[bool] = ..., attempt: _Optional[int] = ..., life: _Optional[int] = ..., round: _Optional[int] = ..., replay: _Optional[bool] = ..., activation: _Optional[_Union[HeldBlob, _Mapping]] = ..., tokens: _Optional[_Union[HeldBlob, _Mapping]] = ..., gradient: _Optional[_Union[HeldBlob, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., loss: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class StageOutcome(_message.Message):
    __slots__ = ("run", "serial", "backward", "attempt", "life", "status", "result", "added", "loss", "compute_ms", "rate", "missing", "signed")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    serial: int
    backward: bool
    attempt: int
    life: int
    status: str
    result: BlobRef
    added: bool
    loss: float
    compute_ms: float
    rate: float
    missing: str
    signed: Signed
    def __init__(self, run: _Optional[bytes] = ..., serial: _Optional[int] = ..., backward: _Optional[bool] = ..., attempt: _Optional[int] = ..., life: _Optional[int] = ..., status: _Optional[str] = ..., result: _Optional[_Union[BlobRef, _Mapping]] = ..., added: _Optional[bool] = ..., loss: _Optional[float] = ..., compute_ms: _Optional[float] = ..., rate: _Optional[float] = ..., missing: _Optional[str] = ..., signed: _Optional[_Union[Signed, _Mapping]] = ...) -> None: ...

class AskReply(_message.Message):
    __slots__ = ("kind", "life", "round", "rate", "retry_ms", "outcome")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    life: int
    round: int
    rate: float
    retry_ms: int
    outcome: StageOutcome
    def __init__(self, kind: _Optional[str] = ..., life: _Optional[int] = ..., round: _Optional[int] = ..., rate: _Optional[float] = ..., retry_ms: _Optional[int] = ..., outcome: _Optional[_Union[StageOutcome, _Mapping]] = ...) -> None: ...

class TellReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run", "serials")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SERIALS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    serials: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[bytes] = ..., serials: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    def __init__(self, run: _Optional[bytes] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepStatement(_message.Message):
    __slots__ = ("run", "round", "life", "version", "ledger", "phase")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    life: int
    version: int
    ledger: bytes
    phase: int
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., life: _Optional[int] = ..., version: _Optional[int] = ..., ledger: _Optional[bytes] = ..., phase: _Optional[int] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OwnedSerials(_message.Message):
    __slots__ = ("owner", "blocks", "bits")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    bits: bytes
    def __init__(self, owner: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., bits: _Optional[bytes] = ...) -> None: ...

class SerialLedger(_message.Message):
    __slots__ = ("owners",)
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedCompositeFieldContainer[OwnedSerials]
    def __init__(self, owners: _Optional[_Iterable[_Union[OwnedSerials, _Mapping]]] = ...) -> None: ...

class RolloutGroup(_message.Message):
    __slots__ = ("round", "serial", "device", "answers")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    serial: int
    device: str
    answers: _containers.RepeatedCompositeFieldContainer[RolloutAnswer]
    def __init__(self, round: _Optional[int] = ..., serial: _Optional[int] = ..., device: _Optional[str] = ..., answers: _Optional[_Iterable[_Union[RolloutAnswer, _Mapping]]] = ...) -> None: ...

class RolloutAnswer(_message.Message):
    __slots__ = ("tokens", "log_probabilities")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: bytes
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[bytes] = ...) -> None: ...

class RolloutsRequest(_message.Message):
    __slots__ = ("run", "round", "serial", "taken", "refused", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    round: int
    serial: int
    taken: int
    refused: int
    reason: str
    def __init__(self, run: _Optional[bytes] = ..., round: _Optional[int] = ..., serial: _Optional[int] = ..., taken: _Optional[int] = ..., refused: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RolloutsReply(_message.Message):
    __slots__ = ("groups", "more")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Signed]
    more: bool
    def __init__(self, groups: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class CarryRequest(_message.Message):
    __slots__ = ("run", "statement", "digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    statement: Signed
    digest: bytes
    def __init__(self, run: _Optional[bytes] = ..., statement: _Optional[_Union[Signed, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class CarryReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    def __init__(self, run: _Optional[bytes] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("toml",)
    TOML_FIELD_NUMBER: _ClassVar[int]
    toml: bytes
    def __init__(self, toml: _Optional[bytes] = ...) -> None: ...

class DialBackRequest(_message.Message):
    __slots__ = ("run", "ports")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[bytes] = ..., ports: _Optional[_Iterable[int]] = ...) -> None: ...

class DialBackReply(_message.Message):
    __slots__ = ("seen", "open")
    SEEN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    seen: str
    open: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seen: _Optional[str] = ..., open: _Optional[_Iterable[int]] = ...) -> None: ...

class RevisionsRequest(_message.Message):
    __slots__ = ("run", "revisions")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    run: bytes
    revisions: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, run: _Optional[bytes] = ..., revisions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class RevisionsReply(_message.Message):
    __slots__ = ("revisions", "round", "round_seconds", "adopted")
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    revisions: _containers.RepeatedCompositeFieldContainer[Signed]
    round: int
    round_seconds: float
    adopted: bytes
    def __init__(self, revisions: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., round: _Optional[int] = ..., round_seconds: _Optional[float] = ..., adopted: _Optional[bytes] = ...) -> None: ...
