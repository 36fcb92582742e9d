"""Reward functions for the examples: ``callable(prompts, responses, **meta) -> list[float]``."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any


def letter_share(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """Share of the letter ``e`` among the characters of each response; the best possible score is 1."""
    return [response.count("e") / max(len(response), 1) for response in responses]


@lru_cache(maxsize=1)
def _sentiment_analyzer() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def vader_sentiment(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
    """VADER's compound sentiment of each response, from -1 to 1 (Hutto and Gilbert 2014)."""
    return [float(_sentiment_analyzer().polarity_scores(response)["compound"]) for response in responses]


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def verified_answer(
    prompts: list[str], responses: list[str], answer: list[str], metadata: list[dict[str, Any]], **_: Any
) -> list[float]:
    """What the ``reasoning-gym`` task of each prompt gives for the response: 1 for the right answer, else less.

    The prompts come from ``tools/make_reasoning_prompts.py``.
    """
    scores = []
    for response, right, details in zip(responses, answer, metadata, strict=True):
        try:
            score = _scorer(details["source_dataset"])(response.strip(), {"answer": right, "metadata": details})
        except (ValueError, TypeError, IndexError, ArithmeticError):
            # Some tasks parse what they score; a response that cannot be parsed is a wrong one.
            score = 0.0
        scores.append(float(score))
    return scores
