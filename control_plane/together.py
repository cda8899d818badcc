"""Questions that come while others are being answered are answered together: one transaction for all who wait.

A transaction costs several trips to the database whatever is asked in it. Under load many want to look at once; the
more wait, the less each of them costs.

Rule: a look begins after every question that it answers was asked, so that none is answered from before. One question
that cannot be answered spoils nobody else's answer.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Final, Generic, TypeVar

from control_plane.contract.refusal import Refusal, RefusalCode, RefusedError

AT_MOST: Final = 32
"""So many questions in one look: whoever asked first waits for the last of them."""
LOOKS_AT_ONCE: Final = 2
"""One is at the database while the other is made of what came back."""
WAITS_SECONDS: Final = 10.0
"""Who asked hears a refusal by then: behind looks at a database that says nothing there would be no end of waiting."""

_NOT_IN_TIME: Final = Refusal(
    RefusalCode.STORE_UNAVAILABLE,
    "the control plane's database does not answer",
    "try again in a moment",
    retry_after_seconds=1,
)

Q = TypeVar("Q")
A = TypeVar("A")


class Together(Generic[Q, A]):
    def __init__(
        self,
        look: Callable[[Sequence[Q]], Awaitable[Sequence[A | Exception]]],
        *,
        waits_seconds: float = WAITS_SECONDS,
    ) -> None:
        """`look` answers every question, in order; an exception among the answers is raised where it was asked."""
        self._look = look
        self._waits_seconds = waits_seconds
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._looking: set[asyncio.Task[None] | None] = set()

    async def __call__(self, question: Q) -> A:
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if len(self._looking) < LOOKS_AT_ONCE:
            # It begins with the loop's next turn: whatever else was read in this one is asked by then.
            # In nobody's context: it goes on for whoever asks next, whose log lines are not the first one's.
            task = asyncio.create_task(self._answer_all(), name="looking together", context=Context())
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)
        try:
            async with asyncio.timeout(self._waits_seconds):
                return await answer
        except TimeoutError:
            raise RefusedError(_NOT_IN_TIME) from None

    async def _answer_all(self) -> None:
        try:
            while self._waiting:
                some = [self._waiting.popleft() for _ in range(min(len(self._waiting), AT_MOST))]
                await self._answer([(question, answer) for question, answer in some if not answer.done()])
        finally:
            # Here and now: a callback would come a turn later, and who asks before it does would wait for nobody.
            self._looking.discard(asyncio.current_task())

    async def _answer(self, asked: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        if not asked:
            return  # all of them have gone
        try:
            answers = await self._look([question for question, _ in asked])
        except RefusedError as refused:
            answers = [refused] * len(asked)  # the database is away: for everybody
        except Exception as error:  # whose it was shows when each is asked alone
            if len(asked) > 1:
                for one in asked:
                    await self._answer([one])
                return
            answers = [error]
        for (_, waiting), answer in zip(asked, answers, strict=True):
            if waiting.done():
                continue  # gone meanwhile
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)
