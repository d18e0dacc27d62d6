"""The tokens of one step, as a tree.

Everything a forward pass may carry is a node with one parent: accepted tokens that are not in the KV cache
yet (the trunk; the whole prompt at first), the Jacobi window's guesses, and the drafts. A node's depth gives
its position id, its ancestors are exactly what it attends to beside the cache.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = -1
"""Parent of the first node, which hangs from the cached text."""


class TokenTree:
    """A trie over token ids in which every parent is added before its children.

    ``tokens[i]``, ``parents[i]`` and ``depths[i]`` describe node ``i``; the first node has parent
    :data:`ROOT` and depth 0. Equal children of one node are one node, so candidates that share a prefix
    share its nodes.
    """

    __slots__ = ("_children", "depths", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._children: list[dict[int, int]] = []

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> TokenTree:
        """A tree without branches: each token is the only child of the one before it."""
        tree = cls()
        node = ROOT
        for token in tokens:
            node = tree.add(node, token)
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Return the child of ``parent`` that carries ``token``, made on first use."""
        if parent == ROOT:
            if self.tokens:
                raise ValueError("a token tree has one root; hang further tokens from an existing node")
            depth = 0
        else:
            siblings = self._children[parent]
            if (known := siblings.get(token)) is not None:
                return known
            siblings[token] = len(self.tokens)
            depth = self.depths[parent] + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self._children.append({})
        return len(self.tokens) - 1

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, or None."""
        return self._children[node].get(token)

    def children(self, node: int) -> Iterable[tuple[int, int]]:
        """``(token, node)`` of a node's children."""
        return self._children[node].items()

    def pop(self) -> None:
        """Take the last node back."""
        parent, token = self.parents.pop(), self.tokens.pop()
        self.depths.pop()
        self._children.pop()
        if parent != ROOT:
            del self._children[parent][token]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, both included."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The token ids from the root to ``node``, both included."""
        return [self.tokens[i] for i in self.path(node)]

    @property
    def is_chain(self) -> bool:
        """True when the tree has no branches, so that plain causal attention is its mask."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))
