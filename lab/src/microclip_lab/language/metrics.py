"""How answers are judged: accuracies of domains, and the metrics that SuperGLUE's tasks have.

Pure functions of what was chosen and what is right; no model, no token.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from microclip_lab.language import superglue_tasks


@dataclass(frozen=True)
class Verdict:
    """The evaluation of one answer."""

    domain: str
    group: int  # answers of one group count together
    chosen: int  # index among the choices
    right: int
    exact: float  # 1 if it is right, else 0
    f1: float  # word F1 with the closest right answer


def summary(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return accuracies by domain and overall, and the metrics of SuperGLUE's tasks."""
    by_domain: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_domain.setdefault(verdict.domain, []).append(verdict)
    accuracies = {domain: fmean(v.exact for v in own) for domain, own in by_domain.items()}
    found = {
        "accuracy": fmean(verdict.exact for verdict in verdicts),  # weights domains by size
        "accuracy_of_domains": fmean(accuracies.values()),  # weights domains equally
    }
    found |= {f"accuracy_{domain}": accuracies[domain] for domain in accuracies}
    for domain, own in by_domain.items():
        found |= {f"{metric}_{domain}": value for metric, value in _more(domain, own).items()}
    if set(by_domain) <= set(superglue_tasks.NAMES):
        found["superglue"] = superglue_score(found, by_domain)
    return found


def superglue_score(found: dict[str, float], domains: Iterable[str]) -> float:
    """Return the mean over tasks; tasks with two metrics count by their mean."""
    scores = []
    for domain in domains:
        pair = {"multirc": ("f1", "exact"), "cb": ("accuracy", "f1"), "record": ("f1", "accuracy")}
        names = pair.get(domain, ("accuracy",))
        scores.append(fmean(found[f"{name}_{domain}"] for name in names))
    return fmean(scores)


def _more(domain: str, own: Sequence[Verdict]) -> dict[str, float]:
    if domain == "cb":
        return {"f1": macro_f1([v.chosen for v in own], [v.right for v in own])}
    if domain == "multirc":
        true = superglue_tasks.MULTIRC_CHOICES.index("True")
        return {
            "f1": class_f1([v.chosen for v in own], [v.right for v in own], true),
            "exact": exact_groups([v.group for v in own], [v.exact for v in own]),
        }
    return {"f1": fmean(v.f1 for v in own)} if domain == "record" else {}


def class_f1(chosen: Sequence[int], right: Sequence[int], positive: int) -> float:
    """Return the F1 of one class: 2 hits / (2 hits + false alarms + misses); 0 without a hit.

    >>> class_f1([1, 1, 0, 0], [1, 0, 1, 0], positive=1)
    0.5
    """
    pairs = list(zip(chosen, right, strict=True))
    hits = sum(c == r == positive for c, r in pairs)
    errors = sum((c == positive) != (r == positive) for c, r in pairs)
    return 2 * hits / (2 * hits + errors) if hits else 0.0


def macro_f1(chosen: Sequence[int], right: Sequence[int]) -> float:
    """Return the mean F1 of all classes that were chosen or right at least once."""
    return fmean(class_f1(chosen, right, one) for one in sorted({*chosen, *right}))


def exact_groups(groups: Sequence[int], exact: Sequence[float]) -> float:
    """Return the share of groups in which every answer is right.

    >>> exact_groups([1, 1, 2, 2], [1, 1, 1, 0])
    0.5
    """
    worst: dict[int, float] = {}
    for group, value in zip(groups, exact, strict=True):
        worst[group] = min(worst.get(group, 1.0), value)
    return fmean(worst.values())


def words(text: str) -> list[str]:
    """Return the normalized words of a text: lower case, no punctuation, no articles.

    >>> words("The U.S. Navy")
    ['us', 'navy']
    """
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def best_f1(text: str, answers: Iterable[str]) -> float:
    """Return the word F1 of a text with the closest right answer.

    >>> best_f1("Barack Obama", ["Obama", "Biden"])
    0.6666666666666666
    """
    return max(_word_f1(words(text), words(answer)) for answer in answers)


def is_exact(text: str, answers: Iterable[str]) -> bool:
    """Return whether a text has the same words as one of the answers."""
    return any(words(text) == words(answer) for answer in answers)


def _word_f1(said: list[str], right: list[str]) -> float:
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def majority(answers: Sequence[str]) -> float:
    """Return the accuracy of always giving the most frequent answer.

    >>> majority(["True", "False", "True"])
    0.6666666666666666
    """
    return max(Counter(answers).values()) / len(answers)
