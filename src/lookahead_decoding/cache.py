"""Keys and values: one growing store per session, and the view of it that a model's forward sees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from lookahead_decoding.errors import CapacityError

_GROWTH = 256  # tokens; stores grow in multiples of it, by half their size at least


@dataclass(frozen=True)
class StateShape:
    """What one layer keeps of each token, for its keys or for its values: ``[heads, dim]``."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class CacheSpec:
    """The shapes of a model's keys and values; None for a layer that keeps none of its own."""

    layers: tuple[tuple[StateShape, StateShape] | None, ...]

    @property
    def bytes_per_token(self) -> int:
        """Memory that one cached token takes in all layers together."""
        return sum(shape.nbytes for layer in self.layers if layer for shape in layer)

    @classmethod
    def of(cls, cache: Cache) -> CacheSpec:
        """The shapes found in a cache that a forward pass has filled."""

        def shape(states: Tensor) -> StateShape:
            return StateShape(states.shape[1], states.shape[3], states.dtype, states.device)

        return cls(
            tuple(
                (shape(layer.keys), shape(layer.values)) if getattr(layer, "is_initialized", False) else None
                for layer in cache.layers
            )
        )


class KVStore:
    """One session's keys and values, written behind its length and then kept or dropped.

    Layers of equal shape share one zero-initialised tensor ``[2 * layers, heads, capacity, dim]``, so that
    keeping a path is one gather. (Zeroed, because a masked NaN still poisons: 0 * NaN is NaN.)

    Args:
        spec: the model's shapes.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.length = 0
        self.capacity = 0
        self._states: dict[StateShape, Tensor] = {}
        self._slots: list[tuple[tuple[StateShape, int], tuple[StateShape, int]] | None] = []
        self._counts: dict[StateShape, int] = {}
        for layer in spec.layers:
            self._slots.append((self._slot(layer[0]), self._slot(layer[1])) if layer else None)

    def _slot(self, shape: StateShape) -> tuple[StateShape, int]:
        self._counts[shape] = self._counts.get(shape, 0) + 1
        return shape, self._counts[shape] - 1

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(states.nbytes for states in self._states.values())

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all."""
        if length <= self.capacity:
            return
        capacity = -(-max(length, self.capacity * 3 // 2) // _GROWTH) * _GROWTH
        # Outside inference mode, so that the tensors can be updated within and without it.
        with torch.inference_mode(False), torch.no_grad():
            for shape, count in self._counts.items():
                states = torch.zeros(count, shape.heads, capacity, shape.dim, dtype=shape.dtype, device=shape.device)
                if (old := self._states.get(shape)) is not None:
                    states[:, :, : self.length] = old[:, :, : self.length]
                self._states[shape] = states
        self.capacity = capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put a step's keys and values ``[heads, T, dim]`` behind the length, in room that is reserved."""
        for (shape, index), new in zip(self._slots_of(layer), (keys, values), strict=True):
            self._states[shape][index, :, self.length : self.length + new.shape[1]] = new

    def read(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Views ``[1, heads, length, dim]`` of a layer's first keys and values."""
        keys, values = (self._states[shape][index, None, :, :length] for shape, index in self._slots_of(layer))
        return keys, values

    def _slots_of(self, layer: int) -> tuple[tuple[StateShape, int], tuple[StateShape, int]]:
        slots = self._slots[layer]
        if slots is None:
            raise IndexError(f"layer {layer} keeps no keys and values of its own")
        return slots

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep these of the nodes just written (ascending), in this order, and drop the rest."""
        kept = len(nodes)
        if any(node != i for i, node in enumerate(nodes)):
            for states in self._states.values():
                index = torch.tensor(nodes, device=states.device) + self.length
                states[:, :, self.length : self.length + kept] = states.index_select(2, index)
        self.length += kept

    def truncate(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        if length > self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length

    @torch.no_grad()
    def load(self, cache: Cache, row: int, slots: Sequence[int]) -> None:
        """Take over what a Transformers cache holds of one row.

        Args:
            cache: one that grows, filled by the same model.
            row: of its batch.
            slots: those of its positions that hold a token the model sees, ascending.
        """
        self.reserve(len(slots))
        for index, layer in enumerate(cache.layers[: len(self.spec.layers)]):
            if self.spec.layers[index] is None:
                continue
            offset = layer.get_seq_length() - layer.keys.shape[2]  # a sliding layer keeps the end alone
            places = [place for place, slot in enumerate(slots) if slot >= offset]
            columns = [slots[place] - offset for place in places]
            for (shape, i), states in zip(self._slots_of(index), (layer.keys, layer.values), strict=True):
                self._states[shape][i][:, places] = states[row][:, columns]
        self.length = len(slots)


@torch.no_grad()
def append_to(cache: Cache, rows: Sequence[tuple[KVStore, Sequence[int]]], first: int, end: int) -> None:
    """Append what stores hold of the positions ``first..end`` to a Transformers cache, zeros where a row has padding.

    Args:
        cache: one that grows and holds the positions before ``first``.
        rows: of the batch, each with its store and the positions of the tokens in it, ascending.
    """
    for index, shapes in enumerate(rows[0][0].spec.layers):
        if shapes is None:
            continue
        new = [
            torch.zeros(len(rows), shape.heads, end - first, shape.dim, dtype=shape.dtype, device=shape.device)
            for shape in shapes
        ]
        for row, (store, slots) in enumerate(rows):
            places = [place for place, slot in enumerate(slots) if first <= slot < end]
            columns = [slots[place] - first for place in places]
            for states, held in zip(new, store.read(index, store.length), strict=True):
                states[row][:, columns] = held[0][:, places]
        cache.update(*new, index)


def check_memory(spec: CacheSpec, length: int) -> None:
    """Refuse a cache of ``length`` tokens that the devices have no room for.

    Raises:
        CapacityError: with the numbers.
    """
    needed: dict[torch.device, int] = {}
    for layer in spec.layers:
        for shape in layer or ():
            needed[shape.device] = needed.get(shape.device, 0) + shape.nbytes * length
    for device, nbytes in needed.items():
        free = free_memory(device)
        if free is not None and nbytes > free:
            raise CapacityError(
                f"a KV cache for {length} tokens takes {nbytes / 2**20:,.0f} MiB and {device} has "
                f"{free / 2**20:,.0f} MiB free; ask for fewer new tokens or a shorter prompt"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None


@dataclass(frozen=True)
class CacheWrite:
    """Where one session's share of a packed pass goes: tokens ``begin..end`` into ``store``."""

    store: KVStore
    begin: int
    end: int


class _StepLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of :class:`StepCache`."""

    is_sliding = False  # masks are ours
    is_croppable = False
    is_compileable = False

    def __init__(self, layer: int, writes: Sequence[CacheWrite], gather: bool) -> None:
        super().__init__()
        self._layer = layer
        self._writes = writes
        self._gather = gather
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the stores exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the packed keys and values ``[1, heads, T, dim]`` to their stores, return what is attended to."""
        for write in self._writes:
            new = slice(write.begin, write.end)
            write.store.write(self._layer, key_states[0, :, new], value_states[0, :, new])
        if not self._gather:
            return key_states, value_states
        read = [w.store.read(self._layer, w.store.length + w.end - w.begin) for w in self._writes]
        if len(read) == 1:
            return read[0]
        return torch.cat([keys for keys, _ in read], dim=2), torch.cat([values for _, values in read], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return max(write.store.length for write in self._writes)

    def get_max_length(self) -> int:
        return -1


class StepCache(Cache):  # type: ignore[misc]
    """The cache object of one forward pass: writes go to the sessions' stores.

    Args:
        writes: the sessions' shares of the packed row.
        num_layers: of the model.
        gather: whether ``update`` returns all cached keys and values of all sessions, one behind the other;
            else the new ones alone, for an attention function that reads the stores itself.
    """

    def __init__(self, writes: Sequence[CacheWrite], num_layers: int, *, gather: bool) -> None:
        super().__init__(layers=[_StepLayer(layer, writes, gather) for layer in range(num_layers)])
