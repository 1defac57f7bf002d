"""Many prompts, several samples of each: what is asked, what came back, and what failed."""

from __future__ import annotations

import asyncio
import html
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from rtk.errors import SamplesFailed
from rtk.session.prompts import PlainPrompt, digest
from rtk.session.sample import Sample
from rtk.session.samples_file import SamplesFile
from rtk.trace.route_trace import RouteTrace

if TYPE_CHECKING:
    from rtk.session.session import Session


@dataclass(frozen=True)
class Job:
    """One sample that is wanted.

    Attributes:
        prompt_index, sample_index: its place.
        occurrence: how many prompts before this one are equal to it.
        prompt: as plain JSON values.
        settings: the sampling parameters of the request.
        source: added to the trace's own source.
    """

    prompt_index: int
    sample_index: int
    occurrence: int
    prompt: PlainPrompt
    settings: dict[str, Any]
    source: Mapping[str, Any]

    @cached_property
    def asked(self) -> str:
        """The same for the same sample in another run, wherever its prompt stands there."""
        return digest(self.prompt, self.settings, self.occurrence, self.sample_index)


def jobs_for(
    prompts: Sequence[PlainPrompt],
    n: int,
    settings: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
) -> list[Job]:
    """n jobs for each prompt; with a seed, sample i of each has seed + i."""
    seen: Counter[str] = Counter()
    jobs = []
    for prompt_index, prompt in enumerate(prompts):
        name = digest(prompt)
        for sample_index in range(n):
            own = dict(settings)
            if "seed" in own:
                own["seed"] += sample_index
            jobs.append(Job(prompt_index, sample_index, seen[name], prompt, own, sources[prompt_index]))
        seen[name] += 1
    return jobs


@dataclass(frozen=True)
class SampleFailure:
    """A sample that could not be had.

    Attributes:
        prompt_index, sample_index: its place, from 0.
        prompt: the prompt, as plain JSON values.
        error: what went wrong.
    """

    prompt_index: int
    sample_index: int
    prompt: PlainPrompt
    error: Exception

    def __str__(self) -> str:
        return f"prompt {self.prompt_index}, sample {self.sample_index}: {type(self.error).__name__}: {self.error}"


class ManySamples(Sequence[Sample]):
    """The samples of a `sample_many` that came back, by prompt and then by sample; and those that did not.

    With `out` they stand in the file and are read from it one by one, so that none need stay in memory.

    Attributes:
        failures: the samples that failed.
        wanted: how many samples were asked for.
    """

    def __init__(self, jobs: Sequence[Job], file: SamplesFile | None) -> None:
        self.failures: list[SampleFailure] = []
        self.wanted = len(jobs)
        self._places = {job.asked: (job.prompt_index, job.sample_index) for job in jobs}
        self._file = file
        self._kept: dict[str, Sample] = {}
        self._order: list[str] | None = None
        self._begin = time.monotonic()
        self._seconds: float | None = None
        self._new_tokens = 0

    @property
    def traces(self) -> list[RouteTrace]:
        """The routes of all samples that have some, for rtk.usage and rtk.replay; all of them in memory."""
        return [sample.trace for sample in self if sample.trace is not None]

    def of_prompt(self, index: int) -> list[Sample]:
        """The samples of one prompt, from 0."""
        return [self._get(asked) for asked in self._sorted() if self._places[asked][0] == index]

    def close(self) -> None:
        """Let others write the file; called when the work has ended."""
        if self._file is not None:
            self._file.close()

    def raise_for_failures(self) -> None:
        """Raise SamplesFailed where a sample failed; its `failures` are this one's."""
        if self.failures:
            raise SamplesFailed(self.failures, self.wanted)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        found = self._sorted()[index]
        return self._get(found) if isinstance(found, str) else [self._get(asked) for asked in found]

    def __len__(self) -> int:
        return len(self._sorted())

    def __iter__(self) -> Iterator[Sample]:
        return (self._get(asked) for asked in self._sorted())

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def _repr_html_(self) -> str:
        listed = "".join(f"<li>{html.escape(str(failure))}</li>" for failure in self.failures[:20])
        more = f"<li>and {len(self.failures) - 20} more</li>" if len(self.failures) > 20 else ""
        return f"<p>{html.escape(self._summary())}</p>" + (f"<ul>{listed}{more}</ul>" if listed else "")

    def _summary(self) -> str:
        missing = self.wanted - len(self) - len(self.failures)
        parts = [f"{len(self)} of {self.wanted} samples", f"{len(self.failures)} failed"]
        if missing:
            parts.append(f"{missing} not asked or not finished")
        seconds = self._seconds or time.monotonic() - self._begin
        if self._new_tokens:
            parts.append(
                f"{self._new_tokens} new tokens in {seconds:.1f} s ({self._new_tokens / seconds:.0f} tokens/s)"
            )
        return ", ".join(parts)

    def _is_done(self, asked: str) -> bool:
        return asked in (self._kept if self._file is None else self._file.done)

    def _sorted(self) -> list[str]:
        if self._order is None:
            self._order = sorted(filter(self._is_done, self._places), key=self._places.__getitem__)
        return self._order

    def _get(self, asked: str) -> Sample:
        sample = self._kept[asked] if self._file is None else self._file.read(asked)
        prompt_index, sample_index = self._places[asked]
        return replace(sample, prompt_index=prompt_index, sample_index=sample_index)

    async def _add(self, asked: str, sample: Sample) -> None:
        if self._file is None:
            self._kept[asked] = sample
        else:
            # Encoding and waiting for the disk take their time, which the other requests need not wait for.
            await asyncio.to_thread(self._file.append, asked, sample)
        self._order = None
        self._new_tokens += len(sample.result.token_ids)


async def run(
    session: Session,
    jobs: Sequence[Job],
    result: ManySamples,
    *,
    concurrency: int,
    routes: bool,
    send: Callable[[Sample | SampleFailure], None],
) -> None:
    """Ask for all jobs that are not done yet, so many at a time, into `result`; each is sent on when it ended."""
    waiting = iter([job for job in jobs if not result._is_done(job.asked)])
    tokens: dict[int, asyncio.Task[list[int]]] = {}

    async def prompt_ids(job: Job) -> list[int]:
        """Tokenized once for all samples of a prompt."""
        if job.prompt_index not in tokens:
            work = session._texts.encode_prompt(job.prompt)
            tokens[job.prompt_index] = asyncio.create_task(work)
        return await tokens[job.prompt_index]

    async def work() -> None:
        for job in waiting:
            try:
                sample = await session._sample_tokens(await prompt_ids(job), job.settings, routes, job.source)
            except Exception as error:
                failure = SampleFailure(job.prompt_index, job.sample_index, job.prompt, error)
                result.failures.append(failure)
                send(failure)
            else:
                sample = replace(sample, prompt_index=job.prompt_index, sample_index=job.sample_index)
                await result._add(job.asked, sample)
                send(sample)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # the disk is full, for example
    finally:
        result.failures.sort(key=lambda failure: (failure.prompt_index, failure.sample_index))
        result._seconds = time.monotonic() - result._begin
        result.close()
