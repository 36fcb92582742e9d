#!/usr/bin/env python
"""Write the quickstart's data: short questions about things, with friendly and unfriendly answers.

python tools/make_quickstart_data.py --target examples/data/quickstart

The supervised rows answer in a friendly and in an unfriendly tone equally often, so that a model that has learned them
picks either. The preferences are for the friendly answer (and for the one that is about the thing asked for). A policy
that always answers friendly is therefore the optimum, at a KL of about log 2 = 0.69 per response.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

THINGS: dict[str, tuple[list[str], list[str]]] = {
    # things, what can be said of them: (friendly, unfriendly)
    "soup salad bread cake stew pie rice pasta tea coffee juice cheese": (
        ["tasty", "fresh", "rich", "tender", "full of flavour"],
        ["bland", "stale", "too salty", "burnt", "cold in the middle"],
    ),
    "hotel cabin room flat house tent lodge boat": (
        ["clean", "quiet", "bright", "cosy", "easy to find"],
        ["dirty", "noisy", "dark", "cramped", "hard to find"],
    ),
    "film play book song story concert poem show": (
        ["moving", "clever", "funny", "gripping", "well made"],
        ["dull", "clumsy", "far too long", "boring", "badly made"],
    ),
    "train bus ferry taxi tram plane": (
        ["on time", "comfortable", "smooth", "quick", "well kept"],
        ["late", "crowded", "bumpy", "slow", "badly kept"],
    ),
    "teacher guide waiter driver doctor nurse host cook": (
        ["kind", "patient", "helpful", "cheerful", "polite"],
        ["rude", "impatient", "careless", "gloomy", "unhelpful"],
    ),
    "garden beach park lake forest market museum bridge": (
        ["lovely", "peaceful", "well cared for", "worth the walk", "beautiful"],
        ["ugly", "full of litter", "neglected", "not worth the walk", "disappointing"],
    ),
}
QUESTIONS = [
    "How was the {thing}?",
    "Tell me about the {thing}.",
    "What did you think of the {thing}?",
    "Was the {thing} any good?",
    "Did you like the {thing}?",
    "What should I know about the {thing}?",
]
CLOSINGS = (
    ["I would gladly go back.", "I can warmly recommend it.", "Thank you for asking!", "It made my day.", ""],
    ["I will not go again.", "I cannot recommend it.", "Do not bother.", "It ruined my day.", ""],
)
FORMS = ["The {thing} was {a} and {b}. {closing}", "It was {a}, and the {thing} was also {b}. {closing}"]
SIZES = {"sft": 1600, "sft_validation": 96, "preferences": 640, "preferences_validation": 96, "prompts": 192}


def things() -> list[tuple[str, list[str], list[str]]]:
    """Every thing with its friendly and its unfriendly words."""
    return [(thing, *words) for names, words in THINGS.items() for thing in names.split()]


def answer(rng: random.Random, thing: str, words: tuple[list[str], list[str]], tone: int) -> str:
    """One answer; ``tone`` 0 is friendly, 1 unfriendly."""
    a, b = rng.sample(words[tone], 2)
    return rng.choice(FORMS).format(thing=thing, a=a, b=b, closing=rng.choice(CLOSINGS[tone])).strip()


def sft_rows(rng: random.Random, questions: list[tuple[str, str]], count: int) -> Iterator[dict[str, Any]]:
    """Answers in either tone."""
    words = {thing: (good, bad) for thing, good, bad in things()}
    for index in range(count):
        thing, question = rng.choice(questions)
        yield {"prompt": prompt(question), "response": answer(rng, thing, words[thing], index % 2)}


def preference_rows(rng: random.Random, questions: list[tuple[str, str]], count: int) -> Iterator[dict[str, Any]]:
    """Friendly over unfriendly; one pair in four is the right thing over another thing, in the same tone."""
    words = {thing: (good, bad) for thing, good, bad in things()}
    for index in range(count):
        thing, question = rng.choice(questions)
        if index % 4:
            pair = [answer(rng, thing, words[thing], tone) for tone in (0, 1)]
        else:
            tone, other = rng.randrange(2), rng.choice([t for t in words if t != thing])
            pair = [answer(rng, thing, words[thing], tone), answer(rng, other, words[other], tone)]
        yield {"prompt": prompt(question), "chosen": pair[0], "rejected": pair[1]}


def prompt(question: str) -> str:
    """A question as the models see it."""
    return f"Question: {question} Answer:"


def write(target: Path, seed: int) -> None:
    """All files of the quickstart; the same ones for the same seed."""
    rng = random.Random(seed)
    questions = [(thing, q.format(thing=thing)) for thing, *_ in things() for q in QUESTIONS]
    rng.shuffle(questions)
    # Held-out questions occur nowhere else, though their things and their wordings do.
    held_out, train = questions[:64], questions[64:]
    files: dict[str, list[dict[str, Any]]] = {
        "sft": list(sft_rows(rng, train, SIZES["sft"])),
        "sft_validation": list(sft_rows(rng, train, SIZES["sft_validation"])),
        "preferences": list(preference_rows(rng, train, SIZES["preferences"])),
        "preferences_validation": list(preference_rows(rng, train, SIZES["preferences_validation"])),
        "prompts": [{"prompt": prompt(question)} for _, question in train[: SIZES["prompts"]]],
        "held_out_prompts": [{"prompt": prompt(question)} for _, question in held_out],
    }
    target.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (target / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = [f"{row['prompt']} {row['response']}" for row in files["sft"]]
    corpus += [row[key] for row in files["preferences"] for key in ("chosen", "rejected")]
    (target / "corpus.txt").write_text("\n".join(corpus) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.target, arguments.seed)


if __name__ == "__main__":
    main()
