"""What the control plane said, for as long as it may be believed.

Rules:
- An answer is believed for `MAX_AGE_SECONDS`; once the event stream is silent for longer than `SILENCE_SECONDS`, only
  for the larger of `SILENT_AGE_SECONDS` and what its credential allows (`max_stale_seconds`). A "no": `NO_AGE_SECONDS`.
- An event removes every answer it touches. An answer that is older than such an event comes too late and is not taken.
- A gap in the sequence, a sequence that goes back, or another epoch means that something was missed: all is dropped.
- Keys are fingerprints; secrets are held as `Secret`. Nothing here does I/O: `resolver` brings answers and events.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from control_plane.contract.caller import Caller, ClientId
from control_plane.contract.destination import Endpoint
from control_plane.contract.refusal import RefusalCode
from control_plane.contract.secret import Secret
from control_plane.contract.wire import (
    SILENCE_SECONDS,
    Answer,
    Ask,
    AskCaller,
    AskPlaceholder,
    AskPolicy,
    AskWorkload,
    BoundLimit,
    CallerFacts,
    Event,
    Policy,
    Refused,
    ResolveAnswer,
    ResolvedPlaceholder,
    WorkloadFacts,
    client_of,
    issuer_of,
)
from egress_proxy.core.plan import PLAN_SECONDS
from egress_proxy.core.quota import Quotas, Standing
from egress_proxy.core.view import KnownCaller, KnownWorkload, Resolved

MAX_AGE_SECONDS: Final = 60.0
SILENT_AGE_SECONDS: Final = 5.0
NO_AGE_SECONDS: Final = 1.0
MAX_NOES: Final = 4096
REMEMBERED_EVENTS: Final = 1024

UNAVAILABLE: Final = Refused(
    RefusalCode.CREDENTIAL_UNAVAILABLE, "The control plane could not be asked.", "Try again shortly."
)

SUSPENDED: Final = Refused(
    RefusalCode.REVOKED_PLACEHOLDER,
    "The placeholder is suspended: replies to its requests gave its secret back, several times within ten minutes.",
    "See what the upstream echoes (coatcheck audit tail shows leak_blocked); it works again by itself in ten minutes.",
)

Tag = tuple[str, str]
"""(kind of event, id): what an event touches, and what an answer is touched by."""
T = TypeVar("T")


class UnexpectedAnswerError(ValueError):
    """An answer of another kind than the question."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    taken_at: float
    max_stale_seconds: float
    tags: frozenset[Tag]


class _Shelf(Generic[T]):
    """Entries of one kind: bounded, the least used dropped first, found by tag when an event comes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.removals = 0
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._by_tag: dict[Tag, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> _Entry[T] | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Hashable, entry: _Entry[T]) -> None:
        self.remove(key)
        self._entries[key] = entry
        for tag in entry.tags:
            self._by_tag.setdefault(tag, set()).add(key)
        while len(self._entries) > self._limit:
            self.remove(next(iter(self._entries)))

    def remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.removals += 1
        for tag in entry.tags:
            keys = self._by_tag[tag]
            keys.discard(key)
            if not keys:
                del self._by_tag[tag]

    def remove_tagged(self, tag: Tag) -> None:
        for key in list(self._by_tag.get(tag, ())):
            self.remove(key)

    def clear(self) -> None:
        self.removals += len(self._entries)
        self._entries.clear()
        self._by_tag.clear()


class Cache:
    """Implements `core.view.CacheView`."""

    def __init__(self, *, limit: int, monotonic: Callable[[], float], clock: Callable[[], float]) -> None:
        """`clock` gives unix seconds, for what the decision compares with expiries."""
        self.quotas = Quotas()
        self._monotonic = monotonic
        self._clock = clock
        self._callers: _Shelf[KnownCaller] = _Shelf(limit)
        self._workloads: _Shelf[KnownWorkload] = _Shelf(limit)
        self._policies: _Shelf[Policy] = _Shelf(limit)
        self._placeholders: _Shelf[Resolved] = _Shelf(limit)
        self._noes: OrderedDict[Ask, tuple[Refused, float]] = OrderedDict()
        self._patience: OrderedDict[Caller | ClientId, float] = OrderedDict()
        self._recent: deque[Event] = deque(maxlen=REMEMBERED_EVENTS)
        self._heard_at: float | None = None
        self._tag_keys: tuple[bytes, ...] = ()
        self._rings = 0
        self._suspended: OrderedDict[str, float] = OrderedDict()
        self._suspensions = 0
        self._limit = limit
        self.epoch: str | None = None
        self.sequence = 0
        self.drops = 0

    # --- the view -----------------------------------------------------------------------------------------------------

    @property
    def tag_keys(self) -> tuple[bytes, ...]:
        return self._tag_keys

    @property
    def revision(self) -> int:
        removals = self._callers.removals + self._policies.removals + self._placeholders.removals
        removals += self._workloads.removals
        return removals + self._rings + self._suspensions

    def caller(self, fingerprint: str) -> KnownCaller | Refused | None:
        entry = self._callers.get(fingerprint)
        if entry is not None and self._is_live(entry.taken_at, self._patience.get(entry.value.facts.caller, 0.0)):
            return entry.value
        return self._no(AskCaller(fingerprint))

    def workload(self, fingerprint: str) -> KnownWorkload | Refused | None:
        entry = self._workloads.get(fingerprint)
        if entry is not None and self._is_live(entry.taken_at, self._patience.get(entry.value.facts.client, 0.0)):
            return entry.value
        return self._no(AskWorkload(fingerprint))

    def policy(self, caller: Caller) -> Policy | Refused | None:
        entry = self._policies.get(caller)
        if entry is not None and self._is_live(entry.taken_at, self._patience.get(caller, 0.0)):
            return entry.value
        return self._no(AskPolicy(caller))

    def placeholder(self, fingerprint: str, caller: Caller, endpoint: Endpoint) -> Resolved | Refused | None:
        entry = self._placeholders.get(fingerprint)
        if entry is not None and self._is_live(entry.taken_at, entry.max_stale_seconds):
            return SUSPENDED if self._is_suspended(entry.value.binding.placeholder_id) else entry.value
        return self._no(AskPlaceholder(fingerprint, caller, endpoint))

    def quota(self, limit: BoundLimit) -> Standing:
        return self.quotas.standing(limit, self._monotonic())

    def quota_resets_in_seconds(self, limit: BoundLimit) -> float:
        return self.quotas.resets_in_seconds(limit, self._monotonic())

    def _is_live(self, taken_at: float, max_stale_seconds: float) -> bool:
        now = self._monotonic()
        limit = MAX_AGE_SECONDS
        if self._heard_at is None or now - self._heard_at > SILENCE_SECONDS:
            limit = min(limit, max(SILENT_AGE_SECONDS, max_stale_seconds))
        return now - taken_at <= limit - PLAN_SECONDS  # a plan made of it may be used for so long

    def _no(self, ask: Ask) -> Refused | None:
        found = self._noes.get(ask)
        if found is None or self._monotonic() - found[1] > NO_AGE_SECONDS:
            return None
        return found[0]

    # --- what it holds ------------------------------------------------------------------------------------------------

    @property
    def _shelves(self) -> "tuple[_Shelf[Any], ...]":
        return (self._callers, self._workloads, self._policies, self._placeholders)

    @property
    def entry_count(self) -> int:
        return sum(len(shelf) for shelf in self._shelves)

    @property
    def silence_seconds(self) -> float:
        """Since the event stream was last heard; infinite before it ever was."""
        return float("inf") if self._heard_at is None else self._monotonic() - self._heard_at

    def drop(self) -> None:
        """Forget every answer."""
        for shelf in self._shelves:
            shelf.clear()
        self._noes.clear()
        self.drops += 1

    # --- what the control plane says ----------------------------------------------------------------------------------

    def set_tag_keys(self, keys: tuple[bytes, ...], *, epoch: str, as_of: int) -> None:
        """The ring, and where the outbox stands: that is where events are read on from."""
        if keys != self._tag_keys:
            self._tag_keys, self._rings = keys, self._rings + 1
        if self.epoch is None:
            self.sequence = as_of
        elif self.epoch != epoch or as_of < self.sequence:
            self.drop()
            self._recent.clear()
            self.sequence = as_of
        self.epoch = epoch

    def take(self, ask: Ask, message: ResolveAnswer) -> bool:
        """An answer has come. False: it is of another epoch, or older than an event that touches it; ask again.

        Raises `UnexpectedAnswerError`.
        """
        answer, tags = message.answer, frozenset(_tags_of(ask, message.answer))
        if message.epoch != self.epoch:
            self.drop()
            return False
        if self._is_outdated(message.as_of, answer, tags):
            return False
        now = self._monotonic()
        match ask, answer:
            case _, Refused():
                self._forget(ask)
                self._put_no(ask, answer)
            case AskCaller(proxy_credential_sha256=key), CallerFacts():
                self._callers.put(key, _Entry(KnownCaller(answer, self._clock()), now, 0.0, tags))
            case AskWorkload(proof_sha256=key), WorkloadFacts():
                self._workloads.put(key, _Entry(KnownWorkload(answer, self._clock()), now, 0.0, tags))
            case AskPolicy(caller=caller), Policy():
                self._policies.put(caller, _Entry(answer, now, 0.0, tags))
            case AskPlaceholder(placeholder_sha256=key), ResolvedPlaceholder(binding=binding):
                resolved = Resolved(binding, Secret(answer.secret), self._clock())
                self._placeholders.put(key, _Entry(resolved, now, binding.max_stale_seconds, tags))
                self._be_patient(binding.caller, binding.max_stale_seconds)
            case _:
                raise UnexpectedAnswerError(f"{type(answer).__name__} in answer to {type(ask).__name__}")
        return True

    def suspend(self, placeholder_id: str, seconds: float) -> None:
        """For that long the placeholder is answered with a "no", whatever is known of it."""
        self._suspended[placeholder_id] = self._monotonic() + seconds
        self._suspensions += 1
        while len(self._suspended) > MAX_NOES:
            self._suspended.popitem(last=False)

    def _is_suspended(self, placeholder_id: str) -> bool:
        until = self._suspended.get(placeholder_id)
        return until is not None and self._monotonic() < until

    def could_not_ask(self, ask: Ask) -> None:
        """The question failed: for a moment the answer is that there is none."""
        self._put_no(ask, UNAVAILABLE)

    def hear(self, event: Event) -> bool:
        """An event, or a heartbeat, has come. False when something was missed, and all was dropped."""
        self._heard_at = self._monotonic()
        is_heartbeat = event.kind == "heartbeat"
        expected = self.sequence if is_heartbeat else self.sequence + 1
        if event.epoch != self.epoch or event.sequence != expected:
            self.drop()
            self._recent.clear()
            self.epoch, self.sequence = event.epoch, event.sequence
            return False
        if not is_heartbeat:
            self.sequence = event.sequence
            self._recent.append(event)
            self._apply(event)
        return True

    def _apply(self, event: Event) -> None:
        self._noes.clear()
        for tag in _touched_by(event):
            for shelf in self._shelves:
                shelf.remove_tagged(tag)

    def _is_outdated(self, as_of: int, answer: Answer, tags: frozenset[Tag]) -> bool:
        if as_of >= self.sequence:
            return False
        newer = [event for event in self._recent if event.sequence > as_of]
        if len(newer) != self.sequence - as_of:
            return True  # not every event since then is remembered
        return any(isinstance(answer, Refused) or not tags.isdisjoint(_touched_by(event)) for event in newer)

    def _forget(self, ask: Ask) -> None:
        match ask:
            case AskCaller(proxy_credential_sha256=key):
                self._callers.remove(key)
            case AskWorkload(proof_sha256=key):
                self._workloads.remove(key)
            case AskPolicy(caller=caller):
                self._policies.remove(caller)
            case AskPlaceholder(placeholder_sha256=key, caller=caller):
                entry = self._placeholders.get(key)
                # A "no" to somebody else says nothing about its owner's entry.
                if entry is not None and entry.value.binding.caller == caller:
                    self._placeholders.remove(key)

    def _put_no(self, ask: Ask, refused: Refused) -> None:
        if isinstance(ask, AskWorkload):
            ask = AskWorkload(ask.proof_sha256)  # an equal question, without the proof itself
        self._noes[ask] = (refused, self._monotonic())
        while len(self._noes) > MAX_NOES:
            self._noes.popitem(last=False)

    def _be_patient(self, caller: Caller, seconds: float) -> None:
        """A credential that may be stale for long is of no use to a caller who may not."""
        if seconds > SILENT_AGE_SECONDS:
            for who in (caller, caller.client):
                self._patience[who] = max(seconds, self._patience.get(who, 0.0))
            while len(self._patience) > self._limit:
                self._patience.popitem(last=False)


def _tags_of(ask: Ask, answer: Answer) -> Iterator[Tag]:
    match ask, answer:
        case AskCaller(proxy_credential_sha256=fingerprint), CallerFacts(caller=caller):
            yield from (("proxy_credential", fingerprint), ("tenant", caller.tenant))
            yield from _session_tag(caller)
        case _, WorkloadFacts(client=client, tenant=tenant, issuer=issuer):
            yield ("proxy_credential", client_of(client))
            if issuer:
                yield ("proxy_credential", issuer_of(issuer))
            if tenant is not None:
                yield ("tenant", tenant)
        case _, Policy(caller=caller):
            yield from (("policy", caller.tenant), ("tenant", caller.tenant))
            yield from _session_tag(caller)
        case _, ResolvedPlaceholder(binding=binding):
            yield from (("placeholder", binding.placeholder_id), ("credential", binding.credential_id))
            yield from (("grant", grant) for grant in binding.grant_ids)
            yield ("tenant", binding.caller.tenant)
            yield from _session_tag(binding.caller)


def _session_tag(caller: Caller) -> Iterator[Tag]:
    if caller.session is not None:
        yield ("session", caller.session)


def _touched_by(event: Event) -> tuple[Tag, ...]:
    match event.kind:
        case "tenant":
            return (("tenant", event.tenant or event.id), ("policy", event.tenant or event.id))
        case "policy":
            return (("policy", event.tenant),)
        case "grant" | "credential":
            # What is granted is also what may be reached.
            return ((event.kind, event.id), ("policy", event.tenant))
        case _:
            return ((event.kind, event.id),)
