"""Reward functions for the examples: ``callable(prompts, responses, **meta) -> list[float]``."""

from __future__ import annotations

from functools import lru_cache
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
