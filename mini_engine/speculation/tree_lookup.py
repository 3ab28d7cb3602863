"""Lesson 14. The radix tree as a draft model: an answer with the same beginning probably continues the same way.

Lesson 8's tree keeps the tokens of answers as well as prompts. A repeated question finds its whole earlier answer
there, step by step. The whole beginning has to match, so a hit is better evidence than any n-gram.
"""

from collections.abc import Hashable

from mini_engine.engine.request import Request
from mini_engine.kv.radix import RadixTree
from mini_engine.kv.radix_node import TOKEN_BYTES, Node, key_of
from mini_engine.speculation.lookup import Drafter


def continuation(tree: RadixTree, key: bytes, namespace: Hashable, count: int) -> list[int]:
    """Return up to `count` tokens that follow the packed tokens `key` in the tree; none if it lacks part of `key`.

    If several prefixes continue from there, the most recently used one is followed. Nothing is locked, split or marked
    as used: the tokens are a guess, and their blocks are not touched.
    """
    found = bytearray()
    with tree.mutex:
        node, at = tree.root, 0
        while len(found) < count * TOKEN_BYTES and (child := _next(node, key, at, namespace, tree.width)):
            rest = key[at:]
            if child.key[: len(rest)] != rest[: len(child.key)]:
                break
            found += child.key[len(rest) :]
            node, at = child, at + len(child.key)
    return list(memoryview(bytes(found[: count * TOKEN_BYTES])).cast("I"))


def _next(node: Node, key: bytes, at: int, namespace: Hashable, width: int) -> Node | None:
    """Return the child to follow after key[:at]; if less than a block of the key is left, one that begins with it."""
    if at + width <= len(key):
        return node.children.get((namespace, key[at : at + width]))
    rest = key[at:]
    fitting = (child for (name, block), child in node.children.items() if name == namespace and block.startswith(rest))
    return max(fitting, key=lambda child: child.last_used, default=None)


class TreeDrafter:
    """Guesses from the tree, and from `fallback` if the tree has nothing."""

    def __init__(self, tree: RadixTree, fallback: Drafter) -> None:
        self.tree, self.fallback = tree, fallback

    def propose(self, request: Request, count: int) -> list[int]:
        """Return up to `count` tokens that may follow the request's own."""
        found = continuation(self.tree, key_of(request.token_ids), request.namespace, count)
        return found or self.fallback.propose(request, count)
