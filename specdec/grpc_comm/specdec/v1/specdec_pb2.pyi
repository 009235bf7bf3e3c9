from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_UNSPECIFIED: _ClassVar[Schedule]
    SCHEDULE_SYNC: _ClassVar[Schedule]
    SCHEDULE_ASYNC: _ClassVar[Schedule]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_GRAMMAR: _ClassVar[GrammarKind]

class SeedScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEED_SCOPE_UNSPECIFIED: _ClassVar[SeedScope]
    SEED_SCOPE_PROMPT: _ClassVar[SeedScope]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Noise(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOISE_UNSPECIFIED: _ClassVar[Noise]
    NOISE_VLLM: _ClassVar[Noise]
SCHEDULE_UNSPECIFIED: Schedule
SCHEDULE_SYNC: Schedule
SCHEDULE_ASYNC: Schedule
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_GRAMMAR: GrammarKind
SEED_SCOPE_UNSPECIFIED: SeedScope
SEED_SCOPE_PROMPT: SeedScope
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
NOISE_UNSPECIFIED: Noise
NOISE_VLLM: Noise

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "template_kwargs_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    template_kwargs_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls_json", "tool_call_id", "name", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls_json: str
    tool_call_id: str
    name: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "version", "after_reasoning")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_REASONING_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    version: str
    after_reasoning: bool
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., version: _Optional[str] = ..., after_reasoning: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "sampling", "max_new_tokens", "stop_token_ids", "ignore_eos", "gamma", "schedule", "stop", "logprobs", "echo", "min_new_tokens", "prompt_logprobs", "grammar", "cache_salt", "committed_token_ids", "model_id", "prompt_digest", "include_rejected", "draft_session", "ids_only", "adapter", "audit", "prediction", "seed_scope")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_REJECTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SESSION_FIELD_NUMBER: _ClassVar[int]
    IDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SEED_SCOPE_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    gamma: int
    schedule: Schedule
    stop: _containers.RepeatedScalarFieldContainer[str]
    logprobs: int
    echo: bool
    min_new_tokens: int
    prompt_logprobs: int
    grammar: Grammar
    cache_salt: str
    committed_token_ids: TokenIds
    model_id: str
    prompt_digest: str
    include_rejected: bool
    draft_session: bytes
    ids_only: bool
    adapter: str
    audit: bool
    prediction: str
    seed_scope: SeedScope
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., gamma: _Optional[int] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., stop: _Optional[_Iterable[str]] = ..., logprobs: _Optional[int] = ..., echo: bool = ..., min_new_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., cache_salt: _Optional[str] = ..., committed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., model_id: _Optional[str] = ..., prompt_digest: _Optional[str] = ..., include_rejected: bool = ..., draft_session: _Optional[bytes] = ..., ids_only: bool = ..., adapter: _Optional[str] = ..., audit: bool = ..., prediction: _Optional[str] = ..., seed_scope: _Optional[_Union[SeedScope, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: GenerationFinished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[GenerationFinished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("num_prompt_tokens", "seed", "prompt_text", "prompt_logprobs", "has_grammar", "num_cached_tokens", "model_id", "grammar_version", "prompt_digest", "defaults", "adapter", "audits")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    seed: int
    prompt_text: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    has_grammar: bool
    num_cached_tokens: int
    model_id: str
    grammar_version: str
    prompt_digest: str
    defaults: RequestDefaults
    adapter: str
    audits: _containers.RepeatedCompositeFieldContainer[TokenAudit]
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_text: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., has_grammar: bool = ..., num_cached_tokens: _Optional[int] = ..., model_id: _Optional[str] = ..., grammar_version: _Optional[str] = ..., prompt_digest: _Optional[str] = ..., defaults: _Optional[_Union[RequestDefaults, _Mapping]] = ..., adapter: _Optional[str] = ..., audits: _Optional[_Iterable[_Union[TokenAudit, _Mapping]]] = ...) -> None: ...

class TokenAudit(_message.Message):
    __slots__ = ("token_id", "choice", "margin", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    choice: int
    margin: float
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., choice: _Optional[int] = ..., margin: _Optional[float] = ..., rank: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    text: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[bytes] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top", "num_characters")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    chosen: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    num_characters: int
    def __init__(self, chosen: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., num_characters: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("token_ids", "text", "num_draft_tokens", "num_accepted_tokens", "timings", "piece_lengths", "logprobs", "finish_reason", "position", "num_lookup_tokens", "num_lookup_accepted", "rejected_text", "num_received_tokens", "hold_us", "rejected_token_ids", "is_held", "is_predicted")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PIECE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLD_US_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    IS_PREDICTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    num_draft_tokens: int
    num_accepted_tokens: int
    timings: Timings
    piece_lengths: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    position: int
    num_lookup_tokens: int
    num_lookup_accepted: int
    rejected_text: str
    num_received_tokens: int
    hold_us: int
    rejected_token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_held: bool
    is_predicted: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., piece_lengths: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., position: _Optional[int] = ..., num_lookup_tokens: _Optional[int] = ..., num_lookup_accepted: _Optional[int] = ..., rejected_text: _Optional[str] = ..., num_received_tokens: _Optional[int] = ..., hold_us: _Optional[int] = ..., rejected_token_ids: _Optional[_Iterable[int]] = ..., is_held: bool = ..., is_predicted: bool = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_us", "compute_us", "draft_us", "network_us", "bytes_up", "bytes_down", "num_wasted_tokens", "num_branch_hits", "round_trip_us", "window", "max_branches", "step_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    NETWORK_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_HITS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    draft_us: int
    network_us: int
    bytes_up: int
    bytes_down: int
    num_wasted_tokens: int
    num_branch_hits: int
    round_trip_us: int
    window: int
    max_branches: int
    step_us: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., draft_us: _Optional[int] = ..., network_us: _Optional[int] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., num_wasted_tokens: _Optional[int] = ..., num_branch_hits: _Optional[int] = ..., round_trip_us: _Optional[int] = ..., window: _Optional[int] = ..., max_branches: _Optional[int] = ..., step_us: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "topology", "max_length", "vocab_size", "tokenizer_fingerprint", "chat_template", "defaults", "model_id", "features", "adapters", "text_fingerprint", "call_format")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    name: str
    topology: str
    max_length: int
    vocab_size: int
    tokenizer_fingerprint: str
    chat_template: str
    defaults: RequestDefaults
    model_id: str
    features: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    text_fingerprint: str
    call_format: str
    def __init__(self, name: _Optional[str] = ..., topology: _Optional[str] = ..., max_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., chat_template: _Optional[str] = ..., defaults: _Optional[_Union[RequestDefaults, _Mapping]] = ..., model_id: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[str]] = ..., text_fingerprint: _Optional[str] = ..., call_format: _Optional[str] = ...) -> None: ...

class RequestDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat", "without_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    without_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., without_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_slots", "num_running", "num_waiting", "draining")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    num_running: int
    num_waiting: int
    draining: bool
    def __init__(self, num_slots: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., draining: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AssistRequest(_message.Message):
    __slots__ = ("attach", "propose", "decline", "slots", "held", "padding")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    propose: AssistPropose
    decline: AssistDecline
    slots: AssistSlots
    held: AssistHeld
    padding: bytes
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., propose: _Optional[_Union[AssistPropose, _Mapping]] = ..., decline: _Optional[_Union[AssistDecline, _Mapping]] = ..., slots: _Optional[_Union[AssistSlots, _Mapping]] = ..., held: _Optional[_Union[AssistHeld, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class AssistResponse(_message.Message):
    __slots__ = ("attached", "open", "commit", "close", "hold", "padding")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    open: AssistOpen
    commit: AssistCommit
    close: AssistClose
    hold: AssistHold
    padding: bytes
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., open: _Optional[_Union[AssistOpen, _Mapping]] = ..., commit: _Optional[_Union[AssistCommit, _Mapping]] = ..., close: _Optional[_Union[AssistClose, _Mapping]] = ..., hold: _Optional[_Union[AssistHold, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("protocol_version", "tokenizer_fingerprint", "vocab_size", "num_slots", "is_private", "takes_tokenizer", "takes_hold", "cpu_ids", "num_threads")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    TAKES_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TAKES_HOLD_FIELD_NUMBER: _ClassVar[int]
    CPU_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    tokenizer_fingerprint: str
    vocab_size: int
    num_slots: int
    is_private: bool
    takes_tokenizer: bool
    takes_hold: bool
    cpu_ids: _containers.RepeatedScalarFieldContainer[int]
    num_threads: int
    def __init__(self, protocol_version: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., num_slots: _Optional[int] = ..., is_private: bool = ..., takes_tokenizer: bool = ..., takes_hold: bool = ..., cpu_ids: _Optional[_Iterable[int]] = ..., num_threads: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("worker_id", "pass_us", "takes_declines", "takes_slots", "tokenizer", "eos_token_ids", "noise")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PASS_US_FIELD_NUMBER: _ClassVar[int]
    TAKES_DECLINES_FIELD_NUMBER: _ClassVar[int]
    TAKES_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pass_us: int
    takes_declines: bool
    takes_slots: bool
    tokenizer: bytes
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    noise: Noise
    def __init__(self, worker_id: _Optional[str] = ..., pass_us: _Optional[int] = ..., takes_declines: bool = ..., takes_slots: bool = ..., tokenizer: _Optional[bytes] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., noise: _Optional[_Union[Noise, str]] = ...) -> None: ...

class AssistOpen(_message.Message):
    __slots__ = ("session_id", "open", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    open: Open
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AssistPropose(_message.Message):
    __slots__ = ("session_id", "propose")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    propose: Propose
    def __init__(self, session_id: _Optional[str] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ...) -> None: ...

class AssistDecline(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class AssistSlots(_message.Message):
    __slots__ = ("num_slots",)
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    def __init__(self, num_slots: _Optional[int] = ...) -> None: ...

class AssistHold(_message.Message):
    __slots__ = ("is_on", "number")
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    is_on: bool
    number: int
    def __init__(self, is_on: bool = ..., number: _Optional[int] = ...) -> None: ...

class AssistHeld(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AssistCommit(_message.Message):
    __slots__ = ("session_id", "commit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    commit: Commit
    def __init__(self, session_id: _Optional[str] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class AssistClose(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol_version", "tokenizer_fingerprint", "vocab_size", "prompt_token_ids", "num_committed_tokens", "sampling", "max_new_tokens", "stop_token_ids", "schedule", "gamma", "stop_at_eos", "min_new_tokens", "grammar", "cache_salt")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    tokenizer_fingerprint: str
    vocab_size: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_committed_tokens: int
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    schedule: Schedule
    gamma: int
    stop_at_eos: bool
    min_new_tokens: int
    grammar: Grammar
    cache_salt: str
    def __init__(self, protocol_version: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., num_committed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., gamma: _Optional[int] = ..., stop_at_eos: bool = ..., min_new_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("branches", "step_us")
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    step_us: int
    def __init__(self, branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., step_us: _Optional[int] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("prefix_length", "parent_node", "token_ids")
    PREFIX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARENT_NODE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prefix_length: int
    parent_node: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prefix_length: _Optional[int] = ..., parent_node: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("position", "token_ids", "num_accepted_tokens", "num_draft_tokens", "timings", "finish_reason", "num_received_tokens", "hold_us", "num_lookup_tokens", "num_lookup_accepted", "is_held")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOLD_US_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_tokens: int
    num_draft_tokens: int
    timings: Timings
    finish_reason: FinishReason
    num_received_tokens: int
    hold_us: int
    num_lookup_tokens: int
    num_lookup_accepted: int
    is_held: bool
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_accepted_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., num_received_tokens: _Optional[int] = ..., hold_us: _Optional[int] = ..., num_lookup_tokens: _Optional[int] = ..., num_lookup_accepted: _Optional[int] = ..., is_held: bool = ...) -> None: ...
