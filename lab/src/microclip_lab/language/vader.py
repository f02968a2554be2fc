"""VADER's sentences: movie reviews, editorials, tweets and product reviews, with many raters.

Every sentence has 15 to 100 ratings from -4 to 4. Their mean is the right label; a single rater,
drawn with the seed, may disagree, which is natural label noise. The split is the same for every
seed. Knows nothing of models or tokens.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from microclip_lab.language.examples import Example, Splits
from microclip_lab.training.fetch import FetchError, Package

Labels = Literal["mean", "rater"]

PACKAGE = Package(
    client="sdist",
    requirement="vaderSentiment==3.3.2",
    file="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
FILES = {
    "movie": "movieReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
    "amazon": "amazonReviewSnippets",
}
DOMAINS = tuple(FILES)
CLEAR = 0.5  # a mean rating closer to 0 than this is neutral
VALIDATION, TEST = 0.1, 0.3  # ends of their ranges in the shuffled documents


@dataclass(frozen=True)
class Sentence:
    """A sentence and its ratings."""

    id: str
    domain: str
    text: str
    mean: float  # as published
    ratings: tuple[int, ...]

    @property
    def document(self) -> str:
        """The editorial or review it is from; a movie snippet or tweet is its own document."""
        return self.id.split("_")[0]


def load(found: Sequence[Sentence], seed: int, labels: Labels, neutral: bool) -> Splits:
    """Return sentences as examples; the seed selects the raters of training labels.

    Args:
        found: All sentences.
        seed: Selects one rater per sentence, with labels="rater".
        labels: Training labels: the "mean" of all raters, or one "rater". Validation and test
            always use the mean.
        neutral: Whether to keep sentences with a mean rating within 0.5 of zero, as a third class.
            Otherwise they are dropped, and only raters who took a side are drawn.
    """
    parts: tuple[list[Example], ...] = ([], [], [])
    draw = np.random.default_rng(seed)
    for sentence, part in split(found):
        right = answer(sentence.mean, CLEAR)
        if right == "neutral" and not neutral:
            continue
        given = right
        if part == 0 and labels == "rater":
            sides = sentence.ratings if neutral else [r for r in sentence.ratings if r]
            given = answer(sides[draw.integers(len(sides))], CLEAR)
        parts[part].append(
            Example(
                id=sentence.id,
                domain=sentence.domain,
                source=f"{sentence.domain} sentence: {sentence.text}",
                target=given,
                choices=choices(neutral),
                answers=(right,),
                truth=right,
            )
        )
    return Splits(*parts)


def only(splits: Splits, domains: Collection[str]) -> Splits:
    """Return the examples of some domains, in every split, with the same raters."""
    return Splits(
        *(
            [example for example in part if example.domain in domains]
            for part in (splits.training, splits.validation, splits.test)
        )
    )


def thinned(splits: Splits, shares: Mapping[str, float], seed: int) -> Splits:
    """Keep a share of each domain's training sentences, at least one, drawn with the seed.

    The selection in one domain does not depend on the others, and a larger share contains a smaller
    one. Domains without a share are kept whole; validation and test are unchanged.
    """
    kept: set[str] = set()
    for place, domain in enumerate(DOMAINS):
        own = [example.id for example in splits.training if example.domain == domain]
        if own:
            count = max(1, round(shares.get(domain, 1.0) * len(own)))
            order = np.random.default_rng((seed, 1, place)).permutation(len(own))
            kept.update(own[row] for row in order[:count])
    return replace(splits, training=[e for e in splits.training if e.id in kept])


def choices(neutral: bool) -> tuple[str, ...]:
    """Return the answers to choose from."""
    return ("negative", "neutral", "positive") if neutral else ("negative", "positive")


def answer(rating: float, clear: float) -> str:
    """Return the class of a rating.

    >>> answer(-2.3, 0.5), answer(0.4, 0.5), answer(1, 0.5)
    ('negative', 'neutral', 'positive')
    """
    if abs(rating) < clear:
        return "neutral"
    return "positive" if rating > 0 else "negative"


def split(found: Sequence[Sentence]) -> Iterator[tuple[Sentence, int]]:
    """Assign each sentence a split: 0 training, 1 validation, 2 test, the same for every seed.

    Whole documents go to one split, and duplicates are dropped, so that no test sentence has a
    neighbor or a twin in the training data.
    """
    seen = set()
    for domain in DOMAINS:
        own = [sentence for sentence in found if sentence.domain == domain]
        documents = list(dict.fromkeys(sentence.document for sentence in own))
        order = np.random.default_rng(0).permutation(len(documents))
        place = {documents[row]: rank / len(documents) for rank, row in enumerate(order)}
        for sentence in own:
            if sentence.text in seen:
                continue
            seen.add(sentence.text)
            rank = place[sentence.document]
            yield sentence, 1 if rank < VALIDATION else 2 if rank < TEST else 0


def sentences() -> list[Sentence]:
    """Return all sentences, downloaded the first time."""
    return read(PACKAGE.fetched())


def read(path: Path) -> list[Sentence]:
    """Read the source distribution of vaderSentiment."""
    found = []
    with tarfile.open(path) as outer:
        archive = outer.extractfile(INNER)
        if archive is None:
            raise FetchError(f"{path} should hold {INNER}, but does not.")
        with tarfile.open(fileobj=archive) as inner:
            for domain, file in FILES.items():
                ratings = {row[0]: row[3] for row in _rows(inner, f"{file}_anonDataRatings.txt")}
                for id_, mean, text in _rows(inner, f"{file}_GroundTruth.txt"):
                    given = tuple(json.loads(ratings[id_]))
                    found.append(Sentence(f"{domain}-{id_}", domain, text, float(mean), given))
    return found


def _rows(archive: tarfile.TarFile, name: str) -> Iterator[list[str]]:
    file = archive.extractfile(f"hutto_ICWSM_2014/{name}")
    assert file is not None
    for line in file.read().decode("utf-8-sig").split("\r\n"):
        if line:
            yield line.split("\t")
