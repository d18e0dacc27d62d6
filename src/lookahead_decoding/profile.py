"""Tuned profiles: what ``lookahead tune`` measured of a model on a machine, kept in the cache folder.

A profile belongs to a model, a dtype, a device and a number of CPU threads. It changes the speed alone, so one that
cannot be used is left aside with a warning of the logger ``lookahead_decoding.profile``, never an error.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import logging
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedModel

from lookahead_decoding import __version__
from lookahead_decoding.config import BUILTIN_SOURCES, LookaheadConfig
from lookahead_decoding.errors import ConfigError, FileFormatError
from lookahead_decoding.fileformat import write_whole
from lookahead_decoding.gguf import cache_dir
from lookahead_decoding.pretrained import gist

logger = logging.getLogger(__name__)

SCHEMA = 1
TUNED_FIELDS = ("window", "ngram", "guesses", "sources", "budget")
"""The fields of :class:`LookaheadConfig` that a profile chooses."""

_LEAST_SHARE = 0.5
"""Of a step at the shortest measured context, what one at a shorter context takes at least."""
_MAX_ROWS = 256

_num_parameters: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class StepTimes:
    """Measured step times, by number of nodes and of cached tokens.

    Attributes:
        nodes: widths, ascending from 1.
        contexts: cached tokens, ascending.
        seconds: of a step, a row per context, a column per width.
    """

    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name, least, numbers in (("nodes", 2, self.nodes), ("contexts", 1, self.contexts)):
            if not all(type(number) is int for number in numbers) or len(numbers) < least:
                raise ValueError(f"{name} are {least} whole numbers or more")
            if list(numbers) != sorted(set(numbers)) or numbers[0] < 0:
                raise ValueError(f"{name} ascend")
        if self.nodes[0] != 1:
            raise ValueError("nodes begin with 1")
        if [len(row) for row in self.seconds] != [len(self.nodes)] * len(self.contexts):
            raise ValueError("seconds has a row per context and a column per width")
        if not all(type(time) in (int, float) and 0 < time < math.inf for row in self.seconds for time in row):
            raise ValueError("seconds are above 0")

    def at(self, nodes: int, context: int) -> float:
        """Seconds of a step: bilinear in log2(nodes) and context, never less for more nodes.

        Beyond the widest measured step the time grows linearly in nodes; beyond the longest context, and before the
        shortest, linearly in context.
        """
        widths, row = self.nodes, self._row(context)
        right = bisect.bisect_left(widths, nodes)
        if right == 0:
            return row[0]
        if right == len(widths):
            slopes = ((row[-1] - row[i]) / (widths[-1] - widths[i]) for i in (-2, 0))
            return row[-1] + max(slopes) * (nodes - widths[-1])
        logs = self._logs
        share = (math.log2(nodes) - logs[right - 1]) / (logs[right] - logs[right - 1])
        return row[right - 1] + share * (row[right] - row[right - 1])

    def _row(self, context: int) -> Sequence[float]:
        """Seconds by measured width, at any context."""
        rows = self._rows
        if (known := rows.get(context)) is not None:
            return known
        if len(rows) >= _MAX_ROWS:
            rows.clear()
        row = self._interpolated(context)
        for i in range(1, len(row)):
            row[i] = max(row[i], row[i - 1])
        rows[context] = row
        return row

    def _interpolated(self, context: int) -> list[float]:
        contexts, table = self.contexts, self._smooth
        if len(contexts) == 1:
            return list(table[0])
        right = min(max(bisect.bisect_left(contexts, context), 1), len(contexts) - 1)
        a, b = table[right - 1], table[right]
        share = (context - contexts[right - 1]) / (contexts[right] - contexts[right - 1])
        row = [x + share * (y - x) for x, y in zip(a, b, strict=True)]
        # Outside of what was measured, noise must not grow into nonsense.
        if share > 1:
            return [max(time, y) for time, y in zip(row, b, strict=True)]
        if share < 0:
            return [min(max(time, _LEAST_SHARE * x), x) for time, x in zip(row, a, strict=True)]
        return row

    @functools.cached_property
    def _rows(self) -> dict[int, Sequence[float]]:
        return {}

    @functools.cached_property
    def _logs(self) -> list[float]:
        return [math.log2(width) for width in self.nodes]

    @functools.cached_property
    def _smooth(self) -> list[list[float]]:
        """The measured times without what noise made of wider steps that took less: their least-squares fit."""
        return [_ascending(row) for row in self.seconds]


def _ascending(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values``: neighbours in the wrong order are averaged."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, its_count = pools.pop()
            total, count = total + before, count + its_count
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


@dataclass(frozen=True)
class ProfileKey:
    """What a profile belongs to.

    Attributes:
        model: the last part of its name, so that ``org/model`` and a folder ``model`` are the same.
        parameters: how many it has.
        dtype: of its weights.
        device: the GPU's name, or the processor's and the number of threads.
    """

    model: str
    parameters: int
    dtype: str
    device: str

    @classmethod
    def of(cls, model: PreTrainedModel, name: str, device: torch.device) -> ProfileKey:
        """The key of a model that goes by this name and takes its tokens on this device."""
        if (parameters := _num_parameters.get(model)) is None:
            parameters = _num_parameters[model] = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            model=re.split(r"[/\\:]", name.rstrip("/\\"))[-1],
            parameters=parameters,
            dtype=str(model.dtype).removeprefix("torch."),
            device=_device_name(device),
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"


@functools.cache
def _processor() -> str:
    """The processor's name, or at least its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), platform.machine() or "cpu")


@dataclass(frozen=True)
class Figures:
    """What the chosen fields came to on the sample prompts.

    Attributes:
        tokens_per_step: new tokens per step.
        nodes_per_step: mean width of a step.
        plain_tokens_per_second: of steps of one node, by the measured step times.
        tokens_per_second: of the steps that were made, by the same.
        flops_per_step: relative to plain decoding's.
    """

    tokens_per_step: float
    nodes_per_step: float
    plain_tokens_per_second: float
    tokens_per_second: float
    flops_per_step: float

    def __post_init__(self) -> None:
        if not all(type(value) in (int, float) and 0 <= value < math.inf for value in astuple(self)):
            raise ValueError("figures are numbers")


@dataclass(frozen=True)
class Profile:
    """What ``lookahead tune`` found.

    Attributes:
        key: the model and the machine.
        versions: of what it was measured with.
        times: the cost curve.
        config: how to guess.
        figures: what that came to.
    """

    key: ProfileKey
    versions: Mapping[str, str]
    times: StepTimes
    config: LookaheadConfig
    figures: Figures

    def cost(self, nodes: int, context: int) -> float:
        """Seconds of a step of so many nodes over so many cached tokens."""
        return self.times.at(nodes, context)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that were chosen."""
        values = self.config.to_dict()
        return {name: values[name] for name in TUNED_FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return {
            "schema": SCHEMA,
            **asdict(self.key),
            "versions": dict(self.versions),
            "curve": {
                "nodes": list(self.times.nodes),
                "contexts": list(self.times.contexts),
                "seconds": [list(row) for row in self.times.seconds],
            },
            "config": self.fields,
            "measured": asdict(self.figures),
        }

    @classmethod
    def from_dict(cls, values: Any) -> Profile:
        """The profile of these values.

        Raises:
            FileFormatError: it is of another schema, or something in it is missing or cannot be.
        """
        try:
            if values["schema"] != SCHEMA:
                raise FileFormatError(f"its schema is {values['schema']!r}, and this version reads {SCHEMA}")
            curve, fields = values["curve"], values["config"]
            if fields.keys() != set(TUNED_FIELDS) or not set(fields["sources"]) <= set(BUILTIN_SOURCES):
                raise ValueError(f"config has {', '.join(TUNED_FIELDS)}, with built-in sources")
            return cls(
                key=ProfileKey(**{name: values[name] for name in ProfileKey.__dataclass_fields__}),
                versions=dict(values["versions"]),
                times=StepTimes(
                    tuple(curve["nodes"]), tuple(curve["contexts"]), tuple(tuple(row) for row in curve["seconds"])
                ),
                config=LookaheadConfig.from_dict(fields),
                figures=Figures(**values["measured"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            missing = f"it has no {error}" if isinstance(error, KeyError) else gist(error)
            raise FileFormatError(f"it is damaged ({missing})") from error


def versions() -> dict[str, str]:
    """What a profile depends on beside its key: the versions of what computes a step."""
    return {
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "lookahead_decoding": __version__,
    }


def folder() -> Path:
    """The folder of all profiles, inside the cache folder."""
    return cache_dir() / "tuned"


def path_of(key: ProfileKey) -> Path:
    """The file for a key, whether it is there or not."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", key.model)[:60].strip("-.") or "model"
    digest = hashlib.sha256(json.dumps(astuple(key)).encode()).hexdigest()[:12]
    return folder() / f"{slug}-{key.dtype}-{digest}.json"


def find(key: ProfileKey) -> Profile | None:
    """The profile that is stored for a key.

    None where there is none. One that is damaged, of another key or of other versions is left aside with a warning,
    the same one only once in a process.
    """
    try:
        path = path_of(key)
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, ConfigError):  # ConfigError: this installation has no cache folder
        return None
    except OSError as error:
        reason = f"it cannot be read ({gist(error)})"
    else:
        try:
            profile = Profile.from_dict(json.loads(text))
            _refuse_other(profile, key)
        except FileFormatError as error:
            reason = str(error)
        except (ValueError, RecursionError) as error:
            reason = f"it is no JSON ({gist(error)})"
        else:
            return profile
    _warn_once(f"the tuned profile {path} is not used: {reason}; run `lookahead tune MODEL` to measure again")
    return None


def _refuse_other(profile: Profile, key: ProfileKey) -> None:
    """Raise a FileFormatError for a profile of something else than what is here."""
    for name, wanted in asdict(key).items():
        if (found := getattr(profile.key, name)) != wanted:
            raise FileFormatError(f"it is of another {name} ({found!r}, not {wanted!r})")
    for name, version in versions().items():
        if (found := profile.versions.get(name)) != version:
            raise FileFormatError(f"it was measured with {name} {found}, and this is {version}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def save(profile: Profile) -> Path:
    """Store a profile in place of an earlier one, see :func:`lookahead_decoding.fileformat.write_whole`.

    Raises:
        ConfigError: there is no cache folder, or it cannot be written.
    """
    path = path_of(profile.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(profile.to_dict(), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be stored in {str(path.parent)!r} ({gist(error)}); set LOOKAHEAD_CACHE to a folder "
            "that can be written"
        ) from error
    return path
