"""Rounds of passes: every group of slots makes one, and they follow each other through the pipeline stages.

In a round each rank runs its first (virtual) stage for all groups in turn, then its second, and so on. With as many
groups as pipeline ranks every rank has work at any time: the tokens of a group come back from the last stage just when
the first one is through with the others. A rank that has sent something does not wait for its receiver, and receives in
the one order in which things are sent, so that groups may end at different times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.megatron.cached_attention import CacheContext, Segment
from mrlhf.megatron.decode import Pipeline, filler_tokens_of_round, round_of_all
from mrlhf.rollout.draw import Drawing
from mrlhf.rollout.kv_cache import KVCache
from mrlhf.rollout.scheduler import Pass, Row, Scheduler


@dataclass
class Flight:
    """A pass on its way.

    Attributes:
        made: what it computes.
        tokens: ``[T]`` ids, with the filling.
        context: where they belong.
        select: ``[n]`` places of the logits.
        drawn: on the last stage the new tokens.
        work: the message with them.
    """

    made: Pass
    tokens: torch.Tensor
    context: CacheContext
    select: torch.Tensor
    drawn: torch.Tensor | None = None
    work: Any = None


class Rounds:
    """Runs a schedule to its end.

    Attributes:
        rows: all sequences, in the order of the requests.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cache: KVCache,
        scheduler: Scheduler,
        rows: Sequence[Row],
        draw: Drawing,
        multiple: int,
        device: torch.device,
    ) -> None:
        """Put the parts together.

        Args:
            pipeline: this rank's stages.
            cache: with a slot for each of the scheduler's.
            scheduler: decides what each pass computes.
            rows: all sequences.
            draw: chooses tokens.
            multiple: tokens of a pass are filled up to a multiple of it.
            device: of the stages.
        """
        self.pipeline, self.cache, self.scheduler = pipeline, cache, scheduler
        self.rows = list(rows)
        self.draw, self.multiple, self.device = draw, multiple, device
        self.pp = pipeline.groups.pp
        self.source = dist.get_process_group_ranks(self.pp)[-1]
        self.filler = filler_tokens_of_round(pipeline.chunks, pipeline.groups)
        count = len(scheduler.groups)
        self.first_slots = [sum(g.capacity for g in scheduler.groups[:i]) for i in range(count)]
        self.flights: list[Flight | None] = [None] * count

    def run(self) -> None:
        """All rounds. Every rank of the replica calls this, and of all replicas where they share experts."""
        more = True
        while round_of_all(more, self.pipeline.groups):
            more = self._round()
        self.pipeline.settle()

    def _round(self) -> bool:
        """One pass of each group that has something to do; whether any had."""
        stages = range(len(self.pipeline.chunks))
        for stage in stages:
            for group in range(len(self.flights)):
                if stage == 0:
                    self.flights[group] = self.next(group)
                flight = self.flights[group]
                if flight is not None:
                    self.advance(stage, flight)
        return any(flight is not None and flight.made.pieces for flight in self.flights)

    def next(self, group: int) -> Flight | None:
        """End the group's pass that is on its way, and prepare the next one."""
        flight = self.flights[group]
        if flight is not None and flight.made.drawn:
            self.scheduler.tell(flight.made, self.arrived(flight))
        made = self.scheduler.plan(group)
        if made is None:
            return self.prepare(Pass(copies=[]), group) if self.filler else None
        first = self.first_slots[group]
        for source, target, length in made.copies:
            self.cache.copy(first + source, first + target, length)
        return self.prepare(made, group)

    def prepare(self, made: Pass, group: int) -> Flight:
        """The tensors of a pass."""
        first, steps = self.first_slots[group], made.steps
        slots: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        ends = set(made.select)
        for piece in made.pieces:
            if len(slots) >= steps:
                start, end = len(slots), len(slots) + piece.length
                segments.append(Segment(start, end, first + piece.slot, piece.position, wanted=end - 1 in ends))
            slots += [first + piece.slot] * piece.length
            positions += range(piece.position, piece.position + piece.length)
        tokens = list(made.tokens)
        filling = -len(tokens) % self.multiple or (0 if tokens else self.filler)
        if filling:
            segments.append(Segment(len(tokens), len(tokens) + filling, self.cache.scratch, 0, wanted=False))
            tokens += [0] * filling
            slots += [self.cache.scratch] * filling
            positions += range(filling)
        context = CacheContext(
            self.cache,
            self._ids(slots),
            self._ids(positions),
            max_sequence_length=self.cache.length,
            lengths=[position + 1 for position in positions[:steps]],
            segments=segments,
            first_slot=first,
        )
        return Flight(made, self._ids(tokens), context, self._ids(made.select))

    def advance(self, stage: int, flight: Flight) -> None:
        """Run one of this rank's stages of a pass; after the last one new tokens are drawn and go to the others."""
        logits = self.pipeline.run(stage, flight.tokens, flight.context, flight.select)
        if logits is None or not flight.made.drawn:
            return
        flight.drawn = self.draw(logits, flight.made.drawn)
        if self.pp.size() > 1:
            flight.work = dist.broadcast(flight.drawn, src=self.source, group=self.pp, async_op=True)

    def arrived(self, flight: Flight) -> list[int]:
        """The tokens drawn in a pass; they, and nothing else, travel back from the last stage."""
        if flight.drawn is None:
            flight.drawn = torch.empty(len(flight.made.drawn), dtype=torch.int64, device=self.device)
            dist.broadcast(flight.drawn, src=self.source, group=self.pp)
        elif flight.work is not None:
            flight.work.wait()
        tokens: list[int] = flight.drawn.tolist()
        return tokens

    def logprobs(self) -> list[list[float]]:
        """Of all tokens, row by row, on every rank; one message after all rounds."""
        lengths = [len(row.response) for row in self.rows]
        found = torch.zeros(sum(lengths), device=self.device)
        if self.pipeline.is_last(len(self.pipeline.chunks) - 1):
            found = self.draw.logprobs(self.rows, found)
        if self.pp.size() > 1 and lengths:
            dist.broadcast(found, src=self.source, group=self.pp)
        return [part.tolist() for part in found.split(lengths)]

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
