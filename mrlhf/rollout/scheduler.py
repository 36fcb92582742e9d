"""Which sequence is in which slot, and what the next pass computes: plain Python, the same on every rank.

Sequences wait in one queue. Slots form groups; the passes of a group follow each other, those of different groups are
in a pipeline at the same time. Whenever sequences of a group end, their slots take the next ones from the queue, whose
prompts are computed in the same pass as the next tokens of the others: nobody waits for the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Ends = Callable[[Sequence[int]], bool]
"""Whether a response is complete; asked after every token, and not asked again once it was."""


class Row:
    """A prompt and what has been said after it.

    Attributes:
        index: place among the requests.
        prompt: token ids.
        limit: longest response.
        response: tokens so far.
        cached: tokens whose keys and values are in the slot.
        source: the sequence with the same prompt from which this one will get its keys and values.
        stopped: whether it has ended other than by its limit.
    """

    __slots__ = ("cached", "index", "limit", "prompt", "response", "source", "stopped")

    def __init__(self, index: int, prompt: tuple[int, ...], limit: int) -> None:
        self.index, self.prompt, self.limit = index, prompt, limit
        self.response: list[int] = []
        self.cached = 0
        self.source: Row | None = None
        self.stopped = False

    @property
    def length(self) -> int:
        """Tokens so far: also the position of the next one."""
        return len(self.prompt) + len(self.response)

    @property
    def ended(self) -> bool:
        """Whether nothing more is said."""
        return self.stopped or len(self.response) >= self.limit

    @property
    def ready(self) -> bool:
        """Whether all but the newest token are in the slot."""
        return self.cached == self.length - 1

    def waiting(self) -> Sequence[int]:
        """The tokens that are not in the slot yet: the rest of the prompt, or the newest token."""
        return self.response[-1:] if self.response else self.prompt[self.cached :]


@dataclass(frozen=True)
class Piece:
    """Tokens ``[position, position + length)`` of the sequence in a slot."""

    slot: int
    position: int
    length: int


@dataclass
class Pass:
    """What a group of slots computes next.

    Attributes:
        copies: ``(source slot, target slot, tokens)``, to be done in this order before it.
        tokens: ids of all pieces, one piece after the other.
        pieces: the first ``steps`` are one token each, of the slots ``0, 1, ..., steps - 1``.
        steps: how many these are.
        drawn: the sequences that get a token.
        select: the place among ``tokens`` after which each of them does.
    """

    copies: list[tuple[int, int, int]]
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    steps: int = 0
    drawn: list[Row] = field(default_factory=list)
    select: list[int] = field(default_factory=list)

    def add(self, sequence: Row, slot: int, length: int) -> None:
        """Compute the next ``length`` tokens of a sequence."""
        self.pieces.append(Piece(slot, sequence.cached, length))
        self.tokens += sequence.waiting()[:length]
        sequence.cached += length
        if sequence.cached == sequence.length:
            self.drawn.append(sequence)
            self.select.append(len(self.tokens) - 1)


class SlotGroup:
    """Slots whose sequences make their passes together; those in use come first."""

    def __init__(self, capacity: int) -> None:
        """Of ``capacity`` slots."""
        self.capacity = capacity
        self.active: list[Row] = []

    def plan(self, queue: deque[Row], prefill_tokens: int) -> Pass | None:
        """Take sequences out that have ended, take new ones in, and say what to compute; None without sequences.

        Args:
            queue: sequences that wait, the next one first.
            prefill_tokens: most tokens of prompts in one pass (and one at least).
        """
        made = Pass(copies=[])
        # Before the slot of an ended sequence is given away: others may still need the prompt that it holds.
        for slot, sequence in enumerate(self.active):
            self._inherit(slot, sequence, made)
        self._remove_ended(made)
        while queue and len(self.active) < self.capacity:
            self._admit(queue.popleft(), made)
        if not self.active:
            return None
        left = prefill_tokens
        for slot, sequence in enumerate(self.active):
            if sequence.ready:
                made.steps += made.steps == slot
                made.add(sequence, slot, 1)
            elif sequence.source is None and left > 0:
                length = min(sequence.length - sequence.cached, left)
                made.add(sequence, slot, length)
                left -= length
        return made

    def _admit(self, sequence: Row, made: Pass) -> None:
        slot = len(self.active)
        if len(sequence.prompt) > 1:
            sequence.source = next((other for other in self.active if other.prompt == sequence.prompt), None)
        self.active.append(sequence)
        self._inherit(slot, sequence, made)

    def _inherit(self, slot: int, sequence: Row, made: Pass) -> None:
        """Copy the prompt once it is complete in its source, all but the last token, whose logits are still needed."""
        source, count = sequence.source, len(sequence.prompt) - 1
        if source is None or source.cached <= count:
            return
        if count:
            made.copies.append((self.active.index(source), slot, count))
        sequence.cached, sequence.source = count, None

    def _remove_ended(self, made: Pass) -> None:
        """Fill each gap with the last sequence that has its prompt behind it, so that these stay together in front."""
        slot = 0
        while slot < len(self.active):
            if not self.active[slot].ended:
                slot += 1
                continue
            last = len(self.active) - 1
            while last > slot and self.active[last].response == []:
                last -= 1
            if last > slot:
                self._move(last, slot, made)
            for behind in range(last + 1, len(self.active)):
                self._move(behind, behind - 1, made)
            self.active.pop()

    def _move(self, source: int, target: int, made: Pass) -> None:
        sequence = self.active[source]
        if sequence.cached and not sequence.ended:
            made.copies.append((source, target, sequence.cached))
        self.active[target] = sequence


class Scheduler:
    """The queue and the groups of slots."""

    def __init__(self, sequences: Sequence[Row], *, groups: int, slots: int, prefill_tokens: int, ends: Ends) -> None:
        """Sort the sequences.

        The longest prompts come first, so that a long one does not begin when the others are done; equal prompts come
        one after the other, so that they can share their keys and values.

        Args:
            sequences: all of them.
            groups: groups of slots.
            slots: slots of all groups together, at least one each.
            prefill_tokens: most tokens of prompts in one pass.
            ends: tells when a response is complete.
        """
        first: dict[tuple[int, ...], int] = {}
        for sequence in sequences:
            first.setdefault(sequence.prompt, sequence.index)
        order = sorted(sequences, key=lambda s: (-len(s.prompt), first[s.prompt], s.index))
        self.queue = deque(order)
        self.groups = [SlotGroup(slots // groups + (g < slots % groups)) for g in range(groups)]
        self.prefill_tokens = prefill_tokens
        self.ends = ends

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; sequences that have just ended may still be in their slots."""
        return not self.queue and all(s.ended for group in self.groups for s in group.active)

    def plan(self, group: int) -> Pass | None:
        """The group's next pass; its previous one's tokens have been told."""
        return self.groups[group].plan(self.queue, self.prefill_tokens)

    def tell(self, made: Pass, tokens: Sequence[int]) -> None:
        """The tokens that were drawn in a pass."""
        for sequence, token in zip(made.drawn, tokens, strict=True):
            sequence.response.append(token)
            sequence.stopped = self.ends(sequence.response)
