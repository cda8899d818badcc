"""The audit trail's chain: events are linked in batches, each batch ends in a signed head, and anybody can check it.

    leaf      SHA-256 of one event as canonical JSON
    head      SHA-256 of a statement: tenant, number, first position, count, digest of the leaves, the head before, when
    signature Ed25519 (RFC 8032) over the statement, by a key that signs nothing else

Each tenant has a chain of its own, and so have the events of no tenant. Positions count its events without a hole.
Where retention took a beginning away, a signed anchor stands in its place.

Rule: what is checked is the export alone, with public keys that come from elsewhere. A line that says nothing checkable
is a problem, never a reason to look away (docs/adr/0013-audit-chain.md). A key that is out of use proves nothing by
itself, whoever has it by now: what it signed counts where a key in use has signed what follows (ADR 0027).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT: Final = "coatcheck-audit/1"
NOTHING_BEFORE: Final = "0" * 64
"""What the first head of a chain follows."""
_SIGNED: Final = b"coatcheck audit\0"
"""So that no signature of ours over something else can be taken for one of these."""
MAX_PROBLEMS: Final = 100

Sign = Callable[[bytes], tuple[str, bytes]]
"""Gives the signing key's id and the signature."""
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditKey:
    """A public key, and when it was in use (seconds since the epoch)."""

    public: Ed25519PublicKey
    since: float = 0.0
    until: float | None = None
    """None: it may sign still. Else every chain has a head of a newer key since, and this one signs nothing more."""


Keys = Mapping[str, AuditKey]
"""By id."""


@dataclass(frozen=True, slots=True)
class Head:
    """The end of one batch, and with it of everything before it."""

    tenant: str | None
    number: int
    """Of the batch, from 1."""
    first: int
    """Position of its first event, from 1."""
    leaves: tuple[str, ...]
    previous: str
    at: float
    key_id: str = ""
    signature: str = ""

    @property
    def last(self) -> int:
        """Position of its last event."""
        return self.first + len(self.leaves) - 1

    @property
    def statement(self) -> bytes:
        return canonical(
            {
                "audit": "head",
                "tenant": self.tenant,
                "number": self.number,
                "first": self.first,
                "count": len(self.leaves),
                "events": hashlib.sha256(canonical(self.leaves)).hexdigest(),
                "previous": self.previous,
                "at": self.at,
            }
        )

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.statement).hexdigest()


@dataclass(frozen=True, slots=True)
class Anchor:
    """Says that everything up to `head` was removed by retention: what is left begins after it."""

    tenant: str | None
    number: int
    position: int
    head: str
    at: float
    key_id: str = ""
    signature: str = ""

    @property
    def statement(self) -> bytes:
        return canonical(
            {
                "audit": "anchor",
                "tenant": self.tenant,
                "number": self.number,
                "position": self.position,
                "head": self.head,
                "at": self.at,
            }
        )


def canonical(value: Any) -> bytes:
    """One spelling for equal values: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def leaf(event: Any) -> str:
    """Of an event as it is stored. None: it was gone already when it should have been chained."""
    return hashlib.sha256(canonical(event)).hexdigest()


def next_head(previous: Head | Anchor | None, *, tenant: str | None, events: Sequence[Any], at: float) -> Head:
    """The head of these events, after `previous`. Not signed yet."""
    match previous:
        case None:
            number, first, before = 1, 1, NOTHING_BEFORE
        case Head():
            number, first, before = previous.number + 1, previous.last + 1, previous.hash
            at = max(at, previous.at)  # several clocks write; a chain's time does not go back
        case Anchor():
            number, first, before = previous.number + 1, previous.position + 1, previous.head
    return Head(tenant, number, first, tuple(leaf(event) for event in events), before, at)


def anchor_at(head: Head, *, at: float) -> Anchor:
    """For a chain of which everything up to and with `head` is removed. Not signed yet."""
    return Anchor(head.tenant, head.number, head.last, head.hash, at)


def signed_head(head: Head, sign: Sign) -> Head:
    key_id, signature = sign(_SIGNED + head.statement)
    return replace(head, key_id=key_id, signature=signature.hex())


def signed_anchor(anchor: Anchor, sign: Sign) -> Anchor:
    key_id, signature = sign(_SIGNED + anchor.statement)
    return replace(anchor, key_id=key_id, signature=signature.hex())


def removable(heads: Sequence[Head], anchor: Anchor | None, keys: Keys) -> Sequence[Head]:
    """Of these, the ones that are a chain's own beginning: signed, and each after the other without a hole.

    What somebody edited is not removed as if its time were over.
    """
    number, sound = anchor.number if anchor is not None else 0, []
    for head in heads:
        number += 1
        if head.number != number or not is_signed(
            head.statement, key_id=head.key_id, signature=head.signature, keys=keys
        ):
            break
        sound.append(head)
    return sound


def is_signed_anchor(anchor: Anchor, keys: Keys) -> bool:
    return is_signed(anchor.statement, key_id=anchor.key_id, signature=anchor.signature, keys=keys)


def is_signed(statement: bytes, *, key_id: str, signature: str, keys: Keys) -> bool:
    key = keys.get(key_id)
    if key is None:
        return False
    try:
        key.public.verify(bytes.fromhex(signature), _SIGNED + statement)
    except (InvalidSignature, ValueError):
        return False
    return True


# --- lines of an export -----------------------------------------------------------------------------------------------


def trail_line(tenant: str | None, *, after: int) -> Json:
    """Begins a chain's part of an export."""
    return {"kind": "trail", "format": FORMAT, "tenant": tenant, "after": after}


def anchor_line(anchor: Anchor) -> Json:
    return {
        "kind": "anchor",
        "tenant": anchor.tenant,
        "number": anchor.number,
        "position": anchor.position,
        "head": anchor.head,
        "at": anchor.at,
        "key_id": anchor.key_id,
        "signature": anchor.signature,
    }


def head_line(head: Head, *, kind: str = "head") -> Json:
    """`kind` is `resume` for the head that an export goes on from, whose events are not in it."""
    return {
        "kind": kind,
        "tenant": head.tenant,
        "number": head.number,
        "first": head.first,
        "last": head.last,
        "leaves": list(head.leaves),
        "previous": head.previous,
        "at": head.at,
        "hash": head.hash,
        "key_id": head.key_id,
        "signature": head.signature,
    }


def event_line(position: int, event: Any, *, differs: Sequence[str] = ()) -> Json:
    """`differs` names the columns beside the stored event that say something else than it does."""
    line: Json = {"kind": "event", "position": position, "event": event}
    return {**line, "differs": list(differs)} if differs else line


def unchained_line(event: Any) -> Json:
    """An event that is in no batch yet."""
    return {"kind": "unchained", "event": event}


def end_line(position: int, *, unchained: int) -> Json:
    """Ends a chain's part: without it the export was cut."""
    return {"kind": "end", "position": position, "unchained": unchained}


class UnreadableLineError(ValueError):
    """Not a line of such an export."""


def head_from_line(line: Mapping[str, Any]) -> Head:
    """Raises `UnreadableLineError`."""
    try:
        return Head(
            tenant=_text_or_none(line["tenant"]),
            number=_whole(line["number"]),
            first=_whole(line["first"]),
            leaves=tuple(_text(each) for each in line["leaves"]),
            previous=_text(line["previous"]),
            at=float(line["at"]),
            key_id=_text(line["key_id"]),
            signature=_text(line["signature"]),
        )
    except (KeyError, TypeError, ValueError):
        raise UnreadableLineError("a head is not readable") from None


def anchor_from_line(line: Mapping[str, Any]) -> Anchor:
    """Raises `UnreadableLineError`."""
    try:
        return Anchor(
            tenant=_text_or_none(line["tenant"]),
            number=_whole(line["number"]),
            position=_whole(line["position"]),
            head=_text(line["head"]),
            at=float(line["at"]),
            key_id=_text(line["key_id"]),
            signature=_text(line["signature"]),
        )
    except (KeyError, TypeError, ValueError):
        raise UnreadableLineError("an anchor is not readable") from None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("not a whole number")  # noqa: TRY004 (one error for every bad field)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a text")  # noqa: TRY004
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


# --- verification -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Finding:
    """What a look at one chain showed."""

    tenant: str | None
    first: int | None = None
    """Position of the first event that was looked at."""
    last: int = 0
    head: str = NOTHING_BEFORE
    number: int = 0
    chained_at: float | None = None
    count: int = 0
    unchained: int = 0
    """Events that are in no batch yet: nothing proves them so far."""
    removed: int = 0
    """Events that retention removed, by a signed anchor."""
    earlier: int = 0
    """Events before the first one that are not in this export, which was resumed after them."""
    lost: int = 0
    """Events that proxies reported as lost before they were written."""
    key_ids: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.problems and not self.lost

    def report(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class Verification:
    """Reads an export line by line, of one chain or of several after each other."""

    def __init__(self, keys: Keys, *, known_heads: Iterable[Head] = ()) -> None:
        """`known_heads` were exported earlier and kept elsewhere: the chain must still lead through them."""
        self._keys = keys
        self._known: dict[str | None, list[Head]] = {}
        for head in known_heads:
            self._known.setdefault(head.tenant, []).append(head)
        self._chains: dict[str | None, _Chain] = {}
        self._chain: _Chain | None = None

    def read(self, line: Mapping[str, Any]) -> None:
        """Raises `UnreadableLineError` where this is no export at all."""
        kind = line.get("kind")
        if kind == "trail":
            self._begin(line)
            return
        if self._chain is None:
            raise UnreadableLineError("this is not an export of the audit trail")
        self._chain.read(kind, line)
        if kind == "end":
            self._chain = None

    def findings(self) -> Iterator[Finding]:
        """At the end of the export."""
        for tenant in self._known.keys() - self._chains.keys():
            finding = Finding(tenant)
            finding.report("there is a head of this chain from earlier, and nothing of the chain is here")
            yield finding
        for chain in self._chains.values():
            yield chain.finished()

    def _begin(self, line: Mapping[str, Any]) -> None:
        if line.get("format") != FORMAT:
            raise UnreadableLineError(f"the export is not of the format {FORMAT}")
        try:
            tenant, after = _text_or_none(line["tenant"]), _whole(line["after"])
        except (KeyError, ValueError):
            raise UnreadableLineError("the line that begins a chain is not readable") from None
        chain = self._chains.get(tenant)
        if chain is None:
            chain = self._chains[tenant] = _Chain(tenant, self._keys, self._known.get(tenant, ()))
        chain.begin(after)
        self._chain = chain


class _Chain:
    def __init__(self, tenant: str | None, keys: Keys, known: Iterable[Head]) -> None:
        self._keys = keys
        self._known = {head.number: head for head in known}
        self._unmet = dict(self._known)
        self._events: list[tuple[Any, Mapping[str, Any]]] = []
        self._is_open = False
        self._is_placed = False
        self._may_begin_later = False
        self._newest_since = 0.0
        """Of the keys that signed heads so far: when the newest came into use."""
        self._unproven: Head | None = None
        """The first head that nothing but a key out of use vouches for."""
        self.finding = Finding(tenant)
        for head in self._known.values():
            if not self._is_signed(head):
                self._report(f"the head {head.number} from earlier is not signed by a known key")

    def begin(self, after: int) -> None:
        if self._is_open:
            self._report("the export was cut off: it does not say that it is complete")
        self._is_open, self._events = True, []
        self.finding.unchained = 0  # a resumed export brings them again
        self._may_begin_later = after > 0 and not self._is_placed

    def read(self, kind: Any, line: Mapping[str, Any]) -> None:
        try:
            match kind:
                case "event":
                    self._event(line)
                case "head":
                    self._head(head_from_line(line))
                case "resume":
                    self._resume(head_from_line(line))
                case "anchor":
                    self._anchor(anchor_from_line(line))
                case "unchained":
                    self.finding.unchained += 1
                    self._note_loss(line.get("event"))
                case "end":
                    self._end(line)
                case _:
                    self._report("a line is of no known kind")
        except UnreadableLineError as error:
            self._report(str(error))

    def finished(self) -> Finding:
        if self._is_open:
            self._report("the export was cut off: it does not say that it is complete")
        for number in sorted(self._unmet):
            self._report(
                f"the end was cut off: batch {number}, of which there is a signed head from earlier, is no longer there"
            )
        if self._unproven is not None:
            self._report(
                f"batches {self._unproven.number} to {self.finding.number} prove nothing: their key is out of use, and "
                "no newer one has signed what follows (is there an export that goes on from here?)"
            )
        return self.finding

    # --- lines

    def _event(self, line: Mapping[str, Any]) -> None:
        expected = self.finding.last + len(self._events) + 1
        if line.get("position") != expected:
            self._report(f"position {expected} is not where it belongs: {line.get('position')!r} stands there")
        for column in line.get("differs") or ():
            self._report(f"event {expected} was altered: its column {column} says something else than its record")
        self._events.append((line.get("event"), line))

    def _head(self, head: Head) -> None:
        events, self._events = self._events, []
        if not self._fits(head):
            return
        self._compare(head, [event for event, _ in events])
        self._advance(head.number, head.last, head.hash, at=head.at)
        self._weigh(head)
        if self.finding.first is None and head.leaves:
            self.finding.first = head.first
        self.finding.count += len(head.leaves)
        self.finding.key_ids.add(head.key_id)
        self._meet(head.number, head.hash)

    def _fits(self, head: Head) -> bool:
        """Whether it is a signed head that follows what came before."""
        finding = self.finding
        if head.tenant != finding.tenant:
            self._report(f"batch {head.number} is of another chain")
            return False
        if not self._is_signed(head):
            self._report(f"batch {head.number} is not signed by a known key, or was altered")
            return False
        if self._keys[head.key_id].since < self._newest_since:
            self._report(
                f"batch {head.number} is signed by a key that was out of use: a newer one had signed before it"
            )
            return False
        if head.number <= finding.number:
            self._report(f"batch {head.number} comes again, after batch {finding.number}")
            return False
        if head.number != finding.number + 1:
            self._report(f"batches {finding.number + 1} to {head.number - 1} are missing")
        elif head.previous != finding.head:
            self._report(f"batch {head.number} does not follow batch {finding.number}: one of them was replaced")
        elif head.first != finding.last + 1:
            self._report(f"batch {head.number} does not begin at position {finding.last + 1}")
        return True

    def _compare(self, head: Head, events: list[Any]) -> None:
        """The events with what was signed of them."""
        found = [leaf(event) for event in events]
        for offset, (signed, here) in enumerate(zip(head.leaves, found, strict=False)):
            position, event = head.first + offset, events[offset]
            if signed == here:
                if event is None:
                    self._report(f"event {position} was deleted before it was chained")
                self._note_loss(event)
            elif event is None:
                self._report(f"event {position} was deleted")
            elif here in head.leaves:
                self._report(f"event {position} is in another's place: events were reordered")
            else:
                self._report(f"event {position} was altered")
        if len(found) < len(head.leaves):
            self._report(f"events {head.first + len(found)} to {head.last} are missing")
        if len(found) > len(head.leaves):
            self._report(f"{len(found) - len(head.leaves)} events after {head.last} were added")

    def _resume(self, head: Head) -> None:
        if not self._is_signed(head) or head.tenant != self.finding.tenant:
            self._report(f"the head {head.number} that the export goes on from is not signed by a known key")
            return
        if self._is_placed:
            if (head.number, head.hash) != (self.finding.number, self.finding.head):
                self._report(f"the export goes on from batch {head.number}, and not from where the last one ended")
            return
        if not self._may_begin_later:
            self._report("the export begins later than it says")
        self.finding.earlier = head.last
        self._advance(head.number, head.last, head.hash, at=head.at)
        self._weigh(head)
        self._meet(head.number, head.hash)
        self._forget_known(through=head.number)

    def _anchor(self, anchor: Anchor) -> None:
        if not is_signed_anchor(anchor, self._keys) or anchor.tenant != self.finding.tenant:
            self._report("the anchor, which stands for removed events, is not signed by a known key")
            return
        if self._keys[anchor.key_id].until is not None:
            self._report("the anchor, which stands for removed events, is signed by a key that is out of use")
            return
        if anchor.number < self.finding.number:
            self._report("the anchor, which stands for removed events, is older than what came before it")
            return
        if anchor.number == self.finding.number and anchor.head != self.finding.head:
            self._report("the anchor, which stands for removed events, is of another chain")
        elif anchor.number == self.finding.number:
            self._unproven = None  # it says the same of everything up to here
        self.finding.removed = anchor.position
        self._advance(anchor.number, anchor.position, anchor.head, at=None)
        self._meet(anchor.number, anchor.head)
        self._forget_known(through=anchor.number)

    def _end(self, line: Mapping[str, Any]) -> None:
        self._is_open = False
        if self._events:
            self._report(f"{len(self._events)} events after position {self.finding.last} are in no batch")
            self._events = []
        if line.get("position") != self.finding.last:
            self._report(f"the chain ends at {self.finding.last}, and the export says {line.get('position')!r}")
        if line.get("unchained") != self.finding.unchained:
            self._report("events at the end, which are in no batch yet, are missing")

    # --- steps

    def _advance(self, number: int, last: int, head: str, *, at: float | None) -> None:
        self._is_placed = True
        finding = self.finding
        finding.number, finding.last, finding.head = number, last, head
        finding.chained_at = at if at is not None else finding.chained_at

    def _weigh(self, head: Head) -> None:
        """A head states the one before, and so everything before: one of a key in use proves all of it."""
        key = self._keys[head.key_id]
        self._newest_since = max(self._newest_since, key.since)
        self._unproven = None if key.until is None else self._unproven or head

    def _meet(self, number: int, found: str) -> None:
        known = self._unmet.pop(number, None)
        if known is None:
            return
        if known.hash == found:
            self._unproven = None  # it was there when that head was exported
        else:
            self._report(f"batch {number} is not the one that was exported earlier: the chain was written anew")

    def _forget_known(self, *, through: int) -> None:
        """Heads of what is no longer, or not in this export, cannot be met."""
        for number in [number for number in self._unmet if number <= through]:
            del self._unmet[number]

    def _is_signed(self, head: Head) -> bool:
        return is_signed(head.statement, key_id=head.key_id, signature=head.signature, keys=self._keys)

    def _note_loss(self, event: Any) -> None:
        if isinstance(event, dict) and event.get("action") == "gap":
            extra = event.get("extra")
            dropped = str(extra.get("dropped", "")) if isinstance(extra, dict) else ""
            self.finding.lost += int(dropped) if dropped.isascii() and dropped.isdigit() else 1

    def _report(self, problem: str) -> None:
        self.finding.report(problem)
