from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Work(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORK_UNSPECIFIED: _ClassVar[Work]
    TRAIN: _ClassVar[Work]
    EVALUATE: _ClassVar[Work]
    DELIVER: _ClassVar[Work]
    DESCRIBE: _ClassVar[Work]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    MODEL: _ClassVar[Kind]
    MESSAGE: _ClassVar[Kind]
    UPDATE: _ClassVar[Kind]
    MASKED: _ClassVar[Kind]
    ENVELOPE: _ClassVar[Kind]
    ROSTER: _ClassVar[Kind]
    METRICS: _ClassVar[Kind]
WORK_UNSPECIFIED: Work
TRAIN: Work
EVALUATE: Work
DELIVER: Work
DESCRIBE: Work
KIND_UNSPECIFIED: Kind
MODEL: Kind
MESSAGE: Kind
UPDATE: Kind
MASKED: Kind
ENVELOPE: Kind
ROSTER: Kind
METRICS: Kind

class ClientFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[ClientFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[ClientFrame, _Mapping]]] = ...) -> None: ...

class ServerFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[ServerFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[ServerFrame, _Mapping]]] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("seq", "hello", "ready", "offer", "want", "chunk", "secagg", "decline", "pong", "renew", "bye", "ask")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SECAGG_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    seq: int
    hello: Hello
    ready: Ready
    offer: Offer
    want: Want
    chunk: Chunk
    secagg: SecAgg
    decline: Decline
    pong: Pong
    renew: Renew
    bye: Bye
    ask: Ask
    def __init__(self, seq: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., secagg: _Optional[_Union[SecAgg, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("seq", "challenge", "welcome", "task", "offer", "want", "chunk", "secagg", "outcome", "retry_at", "ping", "renewed", "goodbye")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SECAGG_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RETRY_AT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    challenge: Challenge
    welcome: Welcome
    task: Task
    offer: Offer
    want: Want
    chunk: Chunk
    secagg: SecAgg
    outcome: Outcome
    retry_at: RetryAt
    ping: Ping
    renewed: Renewed
    goodbye: Goodbye
    def __init__(self, seq: _Optional[int] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., secagg: _Optional[_Union[SecAgg, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., retry_at: _Optional[_Union[RetryAt, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("run", "round", "attempt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "server", "version_min", "version_max")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    server: str
    version_min: int
    version_max: int
    def __init__(self, nonce: _Optional[bytes] = ..., server: _Optional[str] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("client", "version_min", "version_max", "nonce", "signature")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    client: int
    version_min: int
    version_max: int
    nonce: bytes
    signature: bytes
    def __init__(self, client: _Optional[int] = ..., version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "roster_epoch", "roster_sha256", "roster", "heartbeat_ms", "stall_ms", "time_ms", "max_payload", "held")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROSTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    version: int
    roster_epoch: int
    roster_sha256: bytes
    roster: bytes
    heartbeat_ms: int
    stall_ms: int
    time_ms: int
    max_payload: int
    held: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, version: _Optional[int] = ..., roster_epoch: _Optional[int] = ..., roster_sha256: _Optional[bytes] = ..., roster: _Optional[bytes] = ..., heartbeat_ms: _Optional[int] = ..., stall_ms: _Optional[int] = ..., time_ms: _Optional[int] = ..., max_payload: _Optional[int] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("at", "phase", "kind", "sha256", "chunks", "complete")
    AT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    at: Position
    phase: str
    kind: Kind
    sha256: bytes
    chunks: _containers.RepeatedCompositeFieldContainer[Range]
    complete: bool
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ..., phase: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., sha256: _Optional[bytes] = ..., chunks: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., complete: _Optional[bool] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("code", "reason", "hint", "delay_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    hint: str
    delay_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., hint: _Optional[str] = ..., delay_ms: _Optional[int] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("at", "work", "purpose", "algorithm", "settings", "schema_sha256", "model_sha256", "message_sha256", "secure_sum", "remaining_ms")
    AT_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SHA256_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SHA256_FIELD_NUMBER: _ClassVar[int]
    SECURE_SUM_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    at: Position
    work: Work
    purpose: str
    algorithm: str
    settings: bytes
    schema_sha256: bytes
    model_sha256: bytes
    message_sha256: bytes
    secure_sum: bytes
    remaining_ms: int
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ..., work: _Optional[_Union[Work, str]] = ..., purpose: _Optional[str] = ..., algorithm: _Optional[str] = ..., settings: _Optional[bytes] = ..., schema_sha256: _Optional[bytes] = ..., model_sha256: _Optional[bytes] = ..., message_sha256: _Optional[bytes] = ..., secure_sum: _Optional[bytes] = ..., remaining_ms: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ready(_message.Message):
    __slots__ = ("at",)
    AT_FIELD_NUMBER: _ClassVar[int]
    at: Position
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("at", "reason", "field", "asked", "allowed")
    AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    at: Position
    reason: str
    field: str
    asked: str
    allowed: str
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., asked: _Optional[str] = ..., allowed: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("at", "code", "reason", "phase", "hint")
    AT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    at: Position
    code: int
    reason: str
    phase: str
    hint: str
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., phase: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class RetryAt(_message.Message):
    __slots__ = ("delay_ms", "reason", "at")
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    delay_ms: int
    reason: str
    at: Position
    def __init__(self, delay_ms: _Optional[int] = ..., reason: _Optional[str] = ..., at: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class SecAgg(_message.Message):
    __slots__ = ("at", "data")
    AT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    at: Position
    data: bytes
    def __init__(self, at: _Optional[_Union[Position, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("sha256", "size", "chunk_size", "chunk_sha256", "kind", "schema_sha256", "at", "header", "signature", "data")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_SHA256_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_SHA256_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    size: int
    chunk_size: int
    chunk_sha256: _containers.RepeatedScalarFieldContainer[bytes]
    kind: Kind
    schema_sha256: bytes
    at: Position
    header: bytes
    signature: bytes
    data: bytes
    def __init__(self, sha256: _Optional[bytes] = ..., size: _Optional[int] = ..., chunk_size: _Optional[int] = ..., chunk_sha256: _Optional[_Iterable[bytes]] = ..., kind: _Optional[_Union[Kind, str]] = ..., schema_sha256: _Optional[bytes] = ..., at: _Optional[_Union[Position, _Mapping]] = ..., header: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("sha256", "missing", "at")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    missing: _containers.RepeatedCompositeFieldContainer[Range]
    at: Position
    def __init__(self, sha256: _Optional[bytes] = ..., missing: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., at: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sha256", "index", "data", "at")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    index: int
    data: bytes
    at: Position
    def __init__(self, sha256: _Optional[bytes] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ..., at: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("request", "identity_key", "signature", "proof")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    identity_key: bytes
    signature: bytes
    proof: bytes
    def __init__(self, request: _Optional[bytes] = ..., identity_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("certificate", "roster_epoch", "roster_sha256", "roster")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROSTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    roster_epoch: int
    roster_sha256: bytes
    roster: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., roster_epoch: _Optional[int] = ..., roster_sha256: _Optional[bytes] = ..., roster: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("token", "request", "identity_key", "proof", "name")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    request: bytes
    identity_key: bytes
    proof: bytes
    name: str
    def __init__(self, token: _Optional[bytes] = ..., request: _Optional[bytes] = ..., identity_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("client", "certificate", "authority", "roster_epoch", "roster_sha256", "roster")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    ROSTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROSTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    client: int
    certificate: bytes
    authority: bytes
    roster_epoch: int
    roster_sha256: bytes
    roster: bytes
    def __init__(self, client: _Optional[int] = ..., certificate: _Optional[bytes] = ..., authority: _Optional[bytes] = ..., roster_epoch: _Optional[int] = ..., roster_sha256: _Optional[bytes] = ..., roster: _Optional[bytes] = ...) -> None: ...
