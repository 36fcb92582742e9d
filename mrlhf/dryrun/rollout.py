"""The rollout of a dry run: the run's own schedule of passes, of which every kind is walked once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from mrlhf.dryrun.results import Phase
from mrlhf.rollout.draw import Drawing
from mrlhf.rollout.engine import GenerationRequest, RolloutEngine
from mrlhf.rollout.rounds import Rounds
from mrlhf.rollout.sampling import SamplingParams
from mrlhf.rollout.scheduler import Pass

PREFILL, DECODE = "rollout/prefill", "rollout/decode"

Measure = Callable[[str, Callable[[], None]], Phase]
"""Does something as a phase of that name, and tells what it took."""


def rollout_requests(rows: int, samples_per_prompt: int, prompt: int, response: int) -> list[GenerationRequest]:
    """Requests with prompts of ordinary ids, a different one for each group of samples."""
    made = []
    for number in range(rows):
        ids, rest = [1] * prompt, number // samples_per_prompt
        for place in range(prompt):
            rest, digit = divmod(rest, 50)
            ids[place] += digit
        made.append(GenerationRequest(number, ids, response))
    return made


def walk_rollout(
    engine: RolloutEngine,
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    token: int,
    measure: Measure,
) -> tuple[int, dict[str, Phase]]:
    """Plan all passes of a rollout in which no response ends early, and walk those that differ.

    Passes of as many tokens, steps and drawn tokens send the same messages. Of each kind the first one is walked, and
    the one that reads most keys and values.

    Args:
        engine: of the actor.
        requests: of this replica.
        sampling: how tokens are drawn.
        token: what every response consists of.
        measure: walks a pass.

    Returns:
        Bytes of the cache, and the phases: `PREFILL` of the passes with prompts, `DECODE` of the others.
    """
    sample_ids = [request.sample_id for request in requests]
    draw = Drawing(sampling, sample_ids, group=engine.groups.tp, vocab_size=engine.vocab_size, seed=0, step=0)
    rounds = engine.rounds(requests, draw, lambda response: False)
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests) - 1
    walked: dict[tuple[int, ...], Phase] = {}
    counts: dict[str, Counter[tuple[int, ...]]] = {PREFILL: Counter(), DECODE: Counter()}
    more = True
    while more:
        more = False
        for group in range(len(rounds.flights)):
            made = rounds.scheduler.plan(group)
            if made is None:
                continue
            more = True
            name = PREFILL if len(made.pieces) > made.steps else DECODE
            reach = max((piece.position + 1 for piece in made.pieces[: made.steps]), default=0)
            kind = (len(made.tokens), made.steps, len(made.drawn), int(name == DECODE and reach == longest))
            counts[name][kind] += 1
            if kind not in walked:
                walked[kind] = measure(name, partial(_walk, rounds, made, group))
            rounds.scheduler.tell(made, [token] * len(made.drawn))
    return rounds.cache.bytes, {name: _together(found, walked) for name, found in counts.items() if found}


def _walk(rounds: Rounds, made: Pass, group: int) -> None:
    flight = rounds.prepare(made, group)
    for stage in range(len(rounds.pipeline.chunks)):
        rounds.advance(stage, flight)
    if made.drawn:
        rounds.arrived(flight)
    rounds.pipeline.settle()


def _together(counts: Counter[tuple[int, ...]], walked: dict[tuple[int, ...], Phase]) -> Phase:
    """One phase of all passes: as often as there are where they send the same, else once with everything."""
    parts = [walked[kind] for kind in counts]
    peak = max(part.peak for part in parts)
    if all(part.messages == parts[0].messages for part in parts):
        return Phase(times=counts.total(), messages=parts[0].messages, peak=peak)
    messages = sum((Counter({m: n * counts[k] for m, n in walked[k].messages.items()}) for k in counts), Counter())
    return Phase(messages=messages, peak=peak)
