"""Course machinery. Cells of several features each, which together cover every pair: fewer to run than the pairs.

The cells are grown greedily in a fixed order, so they are the same on every machine. Those that start processes, the
most expensive, come first, grow larger, and run on one model each; the others run on a model of each kind of layers.
"""

import functools
from collections.abc import Iterator
from itertools import combinations

from scripts.pages.matrix_cells import FEATURES, KINDS, Cell, Feature, are_allowed

MOST = 6  # features in a cell; the more there are, the more likely one of them hides a bug of two others
MOST_WITH_PROCESSES = 10
# with the first, the second has no effect, so a cell with both covers no other pair of the second
HIDES = (
    ("no prefix caching", "a crowd that shares"),
    ("speculation", "a crowd that shares"),  # only single queries share reads, and a request with guesses has several
)
Pair = frozenset[Feature]


def covering() -> Iterator[Cell]:
    """Yield the cells of each kind of layers."""
    several = [features for features in covering_features() if any(feature.starts_processes for feature in features)]
    for number, model in enumerate(KINDS, 1):  # from 1: the hybrid is too slow for a crowd in several processes
        one = several[number % len(several)]
        for features in covering_features():
            if features is one or features not in several:
                yield Cell(model, features)


@functools.cache
def covering_features() -> tuple[tuple[Feature, ...], ...]:
    """Return the features of each cell, in the order of FEATURES."""
    missing = dict.fromkeys(frozenset(pair) for pair in combinations(in_order(), 2) if are_allowed(pair))
    chosen = []
    while missing:
        features = grown(tuple(next(iter(missing))), missing)
        for pair in shown(features):
            missing.pop(pair, None)
        chosen.append(tuple(feature for feature in FEATURES if feature in features))
    return tuple(chosen)


def in_order() -> list[Feature]:
    """Return the features, those that start processes first."""
    return sorted(FEATURES, key=lambda feature: not feature.starts_processes)


def grown(features: tuple[Feature, ...], missing: dict[Pair, None]) -> tuple[Feature, ...]:
    """Return the features with more, each time the one that adds the most missing pairs."""
    with_processes = any(feature.starts_processes for feature in features)
    while len(features) < (MOST_WITH_PROCESSES if with_processes else MOST):
        more = [(*features, new) for new in in_order() if new not in features and are_allowed((*features, new))]
        best = max(more, key=lambda these: len(shown(these) & missing.keys()))
        if shown(best) & missing.keys() <= shown(features) & missing.keys():
            break
        features = best
    return features


def shown(features: tuple[Feature, ...]) -> set[Pair]:
    """Return the pairs for which a cell is evidence.

    Several processes compute in another way than one, so a pair that needs only one is covered by a cell with only one.
    """
    processes = {feature for feature in features if feature.starts_processes}
    pairs = [frozenset(pair) for pair in combinations(features, 2)]
    return {pair for pair in pairs if (pair & processes or not processes) and not is_hidden(pair, features)}


def is_hidden(pair: Pair, features: tuple[Feature, ...]) -> bool:
    """Return True if one of the other features keeps one of the pair from having an effect."""
    names, others = ({feature.name for feature in these} for these in (pair, set(features) - pair))
    return any(hider in others and hidden in names for hider, hidden in HIDES)
