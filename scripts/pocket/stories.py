"""Course machinery. Small stories from a grammar.

Every choice is weighted, the first option most, so a trained model has a clear favourite at each branch, and sampling
still finds many stories. Within a story, the characters and their roles are fixed.
"""

import random

HEROES = {
    "fox": ("Ruby", "she"),
    "mouse": ("Max", "he"),
    "bear": ("Bruno", "he"),
    "rabbit": ("Lily", "she"),
    "owl": ("Olga", "she"),
    "dog": ("Sam", "he"),
    "cat": ("Mia", "she"),
    "frog": ("Fred", "he"),
    "hedgehog": ("Hugo", "he"),
    "duck": ("Daisy", "she"),
}
PLACES = {
    "in a quiet forest": "forest",
    "near a blue lake": "lake",
    "on a green hill": "hill",
    "in an old garden": "garden",
    "by a wide river": "river",
}
TRAITS = ("little", "clever", "sleepy", "brave", "hungry")
TIMES = ("One morning", "One evening", "One cold day", "One windy night")
FINDS = {
    "a shiny key": "It opened a tiny door, and behind the door was a room full of cakes.",
    "a red ball": "It belonged to a child, so {they} rolled it back to the village.",
    "an old map": "It showed the way to a tall tree, and under the tree lay a box of apples.",
    "a small bell": "It rang so clearly that all the birds came to listen.",
    "a lost letter": "It was for the miller, so {they} carried it to the mill.",
}
FRIENDS = ("an old owl", "a kind hen", "a friendly goat", "a quick squirrel")
ADVICE = ("Be patient", "Follow the path", "Listen well", "Share what you have")
ENDINGS = (
    "From that day on they were good friends.",
    "That night {name} slept very well.",
    "And if you walk there today, you may still meet {name}.",
    "Everybody laughed, and {name} laughed the most.",
)
WEIGHTS = (10, 3, 2, 1.5, 1)


def favourite_first(chooser: random.Random, options):
    """Choose one of the options, the first far more often than the others."""
    options = list(options)
    weights = [WEIGHTS[min(i, len(WEIGHTS) - 1)] for i in range(len(options))]
    return chooser.choices(options, weights)[0]


def tell_story(chooser: random.Random, hero: str | None = None) -> str:
    """Return a story of eight sentences, about `hero` if given."""
    hero = hero or favourite_first(chooser, HEROES)
    name, they = HEROES[hero]
    place = favourite_first(chooser, PLACES)
    find = favourite_first(chooser, FINDS)
    friend = favourite_first(chooser, [f for f in FRIENDS if hero not in f])
    opening = f"Once upon a time there was a {favourite_first(chooser, TRAITS)} {hero} named {name}."
    sentences = [
        opening,
        f"{they.capitalize()} lived {place}.",
        f"{favourite_first(chooser, TIMES)} {name} went for a walk and found {find}.",
        f"{they.capitalize()} did not know what to do with it, so {they} asked {friend}.",
        f'"{favourite_first(chooser, ADVICE)}," said the {friend.split()[-1]}.',
        f"{name} took the {find.split()[-1]} and went on through the {PLACES[place]}.",
        FINDS[find].format(they=they),
        favourite_first(chooser, ENDINGS).format(name=name),
    ]
    return " ".join(sentences)
