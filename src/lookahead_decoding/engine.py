"""The engine: what a newcomer reads first.

A step is one forward pass for every live session: each plans a tree of its last tokens and its guesses about
the next ones, the model computes all trees side by side, each session walks its own tree as far as the model
agrees, and keeps that. Greedy and sampled, single and batched, streamed and not: all of it is
:meth:`Engine.run` over :meth:`Engine.step`.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead_decoding.budget import CostCurve, allot, usual_cost
from lookahead_decoding.cache import KVStore, check_memory
from lookahead_decoding.completion import Chunk, Completion
from lookahead_decoding.config import DEFAULT_DTYPE, MAX_NEW_TOKENS, LookaheadConfig, as_config
from lookahead_decoding.errors import CapacityError, ConfigError
from lookahead_decoding.hub import load
from lookahead_decoding.memory import DraftMemory
from lookahead_decoding.model import ModelRunner
from lookahead_decoding.plan import StepPlan
from lookahead_decoding.profile import Profile, ProfileKey, find
from lookahead_decoding.prompts import Prompt, as_batch, encode, encode_reference
from lookahead_decoding.request import Request, engine_options, resolve
from lookahead_decoding.retention import RetainedStores
from lookahead_decoding.sampling import TokenDrawer
from lookahead_decoding.session import Advance, Session, commit
from lookahead_decoding.stopping import ERROR, StopRules
from lookahead_decoding.text import IncrementalDetokenizer, TextStream
from lookahead_decoding.view import unwrapped

T = TypeVar("T")

RETAINED_BYTES = 256 * 2**20
MAX_SESSIONS = 16


class Engine:
    """Decodes with one model.

    Args:
        model: a Transformers causal LM. Switched to evaluation mode, otherwise not changed.
        tokenizer: its tokenizer; without one, prompts and completions are token ids.
        lookahead: a preset's name, a dict of :class:`LookaheadConfig` fields, or a config.
        attention: ``auto``, ``packed`` or ``masked``.
        pack_weights: multiply by packed copies of the weights on a CPU, which take as much memory again (twice as much
            for bf16 on a CPU without its instructions); None is where that is faster and there is plenty of room.
        retained_bytes: how much K/V of finished sessions is kept for prompts that begin alike.
        tuned: go by what ``lookahead tune`` measured of this model on this machine, if it was run: the step times, and
            its fields in place of the preset ``default``.
        memory: what earlier requests learned, for all requests to guess from and to add to; without one, each starts
            cold and leaves nothing behind.
        name: of the model, for the record.

    Raises:
        UnsupportedModelError: the model keeps no attention cache, or fails the probe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
        attention: str = "auto",
        pack_weights: bool | None = None,
        retained_bytes: int = RETAINED_BYTES,
        tuned: bool = True,
        memory: DraftMemory | None = None,
        name: str | None = None,
    ) -> None:
        self.model = unwrapped(model).eval()
        self.tokenizer = tokenizer
        self.config = as_config(lookahead)
        self._lookahead = lookahead
        self.runner = ModelRunner(self.model, attention, pack_weights=pack_weights)
        self.name = name or self.model.config.name_or_path or type(self.model).__name__
        self.memory = memory
        self._retained = RetainedStores(retained_bytes)
        self.use_profile(find(self.profile_key) if tuned else None)

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | None = None,
        *,
        dtype: str | torch.dtype = DEFAULT_DTYPE,
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        lookahead: str | Mapping[str, Any] | LookaheadConfig = "default",
        attention: str = "auto",
        pack_weights: bool | None = None,
        tuned: bool = True,
    ) -> Engine:
        """Load a model and its tokenizer: a Hub id, a folder, a ``.gguf`` file, ``repo:file.gguf``, or the default."""
        as_config(lookahead)  # refused before anything is loaded
        loaded = load(id_or_path, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code)
        return cls(
            loaded.model,
            loaded.tokenizer,
            lookahead=lookahead,
            attention=attention,
            pack_weights=pack_weights,
            tuned=tuned,
            name=loaded.name,
        )

    @property
    def profile_key(self) -> ProfileKey:
        """What a tuned profile would have to belong to, with PyTorch's present number of threads."""
        return ProfileKey.of(self.model, self.name, self.runner.device)

    def use_profile(self, profile: Profile | None) -> None:
        """Go by what ``lookahead tune`` measured from now on; None is by how step time usually grows."""
        self.profile = profile
        self.config = self.configured(self._lookahead)
        usual = usual_cost(self.runner.device.type, str(self.model.dtype).removeprefix("torch."))
        self.costs = CostCurve(usual if profile is None else profile.cost)

    def configured(self, lookahead: str | Mapping[str, Any] | LookaheadConfig) -> LookaheadConfig:
        """The config that a ``lookahead=`` argument comes to: tuned fields stand in for the preset ``default``."""
        return as_config(lookahead, None if self.profile is None else self.profile.config)

    # One step, and the one loop.

    def step(self, sessions: Sequence[Session]) -> list[Advance]:
        """Advance every session by one forward pass that they share.

        Sessions may differ in length, config and stage, and may come and go between steps; those that share a
        drawer come together. A session that fails (a processor raises, say) ends with ``end == "error"``, and so do
        those of its drawer; the others advance before it is raised.
        """
        if any(session.end is not None for session in sessions) or len(set(sessions)) < len(sessions):
            raise ValueError("a session takes part in a step once, and not after its end")
        begun = time.perf_counter()
        context = sum(session.store.length for session in sessions) // max(1, len(sessions))
        cost, hoped = self.costs.at(context), self.costs.hoped(context)
        undecided = [session for session in sessions if session.statistics.steps == 0]
        failures: list[Exception] = []

        def guarded(session: Session, call: Callable[[], T]) -> T | None:
            try:
                return call()
            except Exception as error:
                for each in sessions:
                    if each.drawer is session.drawer:
                        each.end = ERROR
                failures.append(error)
                return None

        with torch.inference_mode():
            planned = [(session, guarded(session, functools.partial(session.plan, hoped))) for session in sessions]
            growing = [(session, grower) for session, grower in planned if grower is not None]
            allot([(grower, session.config) for session, grower in growing], hoped)
            finished = [(session, guarded(session, grower.finish)) for session, grower in growing]
            steps = [(session, plan) for session, plan in finished if plan is not None and session.end is None]
            together: dict[TokenDrawer, list[tuple[Session, StepPlan, Tensor]]] = {}
            for (session, plan), rows in zip(steps, self._forward(steps), strict=True):
                together.setdefault(session.drawer, []).append((session, plan, rows))
            advances: dict[Session, Advance] = {}
            for group in together.values():
                decided = guarded(group[0][0], functools.partial(commit, group)) or ()
                advances.update(zip((session for session, _, _ in group), decided, strict=False))
        seconds = time.perf_counter() - begun
        nodes = sum(len(plan.tree) for _, plan in steps)
        trunks = sum(plan.start + 1 if plan.decides else len(plan.tree) for _, plan in steps)
        if steps and not undecided:
            self.costs.record(nodes, context, seconds)
        for session in sessions:
            prefill = session in undecided
            session.statistics.add_time(seconds, prefill=prefill, cost=cost(nodes), plain_cost=cost(trunks))
        if failures:
            raise failures[0]
        return [advances[session] for session in sessions]

    def _forward(self, steps: Sequence[tuple[Session, StepPlan]]) -> list[Tensor]:
        """Each session's logits: one pass, or one per group of sessions that cannot share one."""
        groups: dict[int, list[int]] = {}
        for i, (session, plan) in enumerate(steps):
            last = session.store.length + max(plan.tree.depths)
            groups.setdefault(self.runner.pass_group(last), []).append(i)
        logits: dict[int, Tensor] = {}
        for members in groups.values():
            rows = self.runner.forward(
                [(plan, session.store, session.next_embeddings) for session, plan in (steps[i] for i in members)]
            )
            logits.update(zip(members, rows, strict=True))
        return [logits[i] for i in range(len(steps))]

    def run(
        self, sessions: Iterable[Session], *, max_sessions: int = MAX_SESSIONS
    ) -> Generator[tuple[Session, Advance]]:
        """Step sessions until all have ended. Closing the generator cancels; their caches are taken back.

        Args:
            sessions: taken as there is room for them.
            max_sessions: how many share a step at most.
        """
        waiting = iter(sessions)
        live: list[Session] = []
        try:
            while live := [*live, *itertools.islice(waiting, max_sessions - len(live))]:
                yield from zip(live, self.step(live), strict=True)
                for session in live:
                    if session.end is not None:
                        self.close(session)
                live = [session for session in live if session.end is None]
        finally:
            for session in live:
                self.close(session)

    # Sessions.

    def open(
        self,
        prompt: Sequence[int],
        request: Request,
        *,
        lookahead: str | Mapping[str, Any] | LookaheadConfig | None = None,
        generator: torch.Generator | None = None,
        max_length: int | None = None,
        stop_strings: Sequence[str] = (),
        references: Sequence[Sequence[int]] = (),
    ) -> Session:
        """A session for one prompt, with the K/V of a finished one that began alike.

        Args:
            prompt: token ids.
            request: how Transformers resolved its options.
            lookahead: how it guesses; None is the engine's config.
            generator: the sampling noise's; None is torch's global one.
            max_length: bound on prompt and new tokens together, beside the request's.
            stop_strings: end before the text contains one of these.
            references: token ids that are expected to be seen again; they feed the suffix source only.

        Raises:
            CapacityError: the KV cache for it does not fit into memory.
        """
        config = self.config if lookahead is None else self.configured(lookahead)
        if self.memory is not None and self.memory.vocab_size != self.runner.vocab_size:
            raise ConfigError(
                f"the memory is for {self.memory.model!r}, whose vocabulary has {self.memory.vocab_size} tokens, and "
                f"this model's has {self.runner.vocab_size}; give one that was learned with this model"
            )
        text = None
        if self.tokenizer is not None:
            text = TextStream(IncrementalDetokenizer(self.tokenizer), stop_strings)
        stop = StopRules(request.criteria, max_length=max_length, text=text)
        length = len(prompt) + MAX_NEW_TOKENS if stop.max_length is None else stop.max_length
        return Session(
            prompt,
            config=config,
            runner=self.runner,
            store=self._store(prompt, length),
            drawer=request.drawer(self.runner.vocab_size, generator),
            stop=stop,
            text=text,
            references=references,
            memory=self.memory,
            sampling=request.sampling(None if generator is None else generator.initial_seed()),
        )

    def _store(self, prompt: Sequence[int], length: int) -> KVStore:
        """A KV store for ``length`` tokens, with what a finished session left of the prompt's beginning."""
        check_memory(self.runner.spec, length)
        # The last token of a prompt is always computed: its logits decide the first new one.
        known = self._retained.take(prompt[:-1]) if self.runner.can_reuse(len(prompt)) else None
        return known or KVStore(self.runner.spec)

    def close(self, session: Session) -> None:
        """Take a session's K/V back and keep it for a while, the most recent within ``retained_bytes``."""
        session.close()
        # What a failed session holds may be NaN, which would poison the next one.
        if session.end != ERROR and self.runner.can_reuse(session.store.length):
            self._retained.put(session.cached_ids, session.store)

    def forget(self) -> None:
        """Drop all K/V of finished sessions."""
        self._retained.clear()

    # What users call.

    @overload
    def generate(self, prompts: Prompt, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]: ...
    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> Completion | list[Completion]:
        """Complete one prompt, or several in the same passes.

        Args:
            prompts: text as it is, token ids, a chat's messages, or a list of these.
            options: those of :meth:`stream`.

        Returns:
            A completion, or a list of them for a list. With one seed, a sampled completion is the same alone
            and in company.
        """
        batch, is_single = as_batch(prompts)
        openers = [self._prepare(prompt, **options) for prompt in batch]
        index_of: dict[Session, int] = {}

        def sessions() -> Iterator[Session]:
            for index, opener in enumerate(openers):
                session = opener()
                index_of[session] = index
                yield session

        completions: dict[int, Completion] = {}
        for session, advance in self.run(sessions()):
            if advance.end is not None:
                completions[index_of.pop(session)] = self.completion(session)
        return completions[0] if is_single else [completions[i] for i in range(len(batch))]

    def stream(self, prompt: Prompt, **options: Any) -> Generator[Chunk]:
        """Complete one prompt step by step. Closing the generator cancels.

        Args:
            prompt: text as it is, token ids, or a chat's messages.
            options: ``max_new_tokens`` (256); ``stop``, a string or several that end the text; ``references``, texts
                or token ids that you expect to see again (a file to be edited, a passage), no part of the prompt;
                ``lookahead``, in place of the engine's; ``temperature`` (0 is greedy), ``top_k``, ``top_p``,
                ``min_p``, ``seed``; any further option of Transformers' ``generate`` that concerns processors,
                warpers or stopping criteria. What is not given comes from the model's generation config.

        Raises:
            ConfigError: an unknown option or an impossible value.
            UnsupportedOptionError: an option that lookahead decoding does not do.
            CapacityError: the prompt does not fit the context, or its cache the memory.
        """
        session = self._prepare(prompt, **options)()

        def chunks() -> Generator[Chunk]:
            for _, advance in self.run([session]):
                if advance.tokens:
                    yield Chunk(
                        text="".join(advance.pieces),
                        token_ids=advance.tokens,
                        sources=advance.sources,
                        pieces=advance.pieces,
                        finish_reason=advance.end,
                        completion=self.completion(session) if advance.end else None,
                    )

        return chunks()

    def completion(self, session: Session) -> Completion:
        """What a session that has ended comes to."""
        if session.end is None:
            raise ValueError("the session has not ended")
        return Completion(
            text=session.text,
            token_ids=session.tokens,
            prompt_tokens=len(session.prompt),
            cached_tokens=session.cached_tokens,
            finish_reason=session.end,
            sampling=session.sampling,
            statistics=session.statistics,
            config=session.config,
            model=self.name,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.runner.device),
            threads=torch.get_num_threads(),
            kv_bytes=session.store.nbytes,
            pool_bytes=session.pool_bytes,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids, the chat template applied to messages."""
        return encode(prompt, self.tokenizer, self.runner.vocab_size)

    def _prepare(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        references: Sequence[str | Sequence[int]] = (),
        lookahead: str | Mapping[str, Any] | LookaheadConfig | None = None,
        **options: Any,
    ) -> Callable[[], Session]:
        """Check and resolve everything; what is returned opens the session."""
        ids = self.encode(prompt)
        context = self.runner.max_position
        if context is not None and len(ids) >= context:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens and the model's context is {context}, which leaves no room for "
                "a new one; shorten the prompt"
            )
        stop_strings = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(string, str) and string for string in stop_strings):
            raise ConfigError(f"stop takes strings that are not empty; got {stop!r}")
        if stop_strings and self.tokenizer is None:
            raise ConfigError("stop strings need a tokenizer; this engine has none")
        if isinstance(references, str):
            raise ConfigError("references is a list of texts or of token ids; got one text: put it into a list")
        tensor = torch.tensor([ids], device=self.runner.device)
        # Without a mask Transformers would hide tokens that look like padding.
        options = {"attention_mask": torch.ones_like(tensor), **engine_options(options)}
        request = resolve(self.model, tensor, max_new_tokens=max_new_tokens, **options)
        generator = None
        if request.samples:
            seed = secrets.randbits(32) if seed is None else seed
            generator = torch.Generator(self.runner.device).manual_seed(seed)
        return functools.partial(
            self.open,
            ids,
            request,
            lookahead=self.config if lookahead is None else self.configured(lookahead),
            generator=generator,
            max_length=context,
            stop_strings=stop_strings,
            references=[encode_reference(each, self.tokenizer, self.runner.vocab_size) for each in references],
        )
