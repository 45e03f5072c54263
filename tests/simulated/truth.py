"""What must hold of a run, whatever happens to its machines. A breach raises `BrokenPromise`.

The content of a state stands for every bit of it: a number made of the content of the state before
and of the epoch that made the step. Two epochs never make the same one, so that a state of an epoch
that was dropped is told from one that counts.
"""

from collections.abc import Collection, Iterable, Mapping

INITIAL = 0  # the content of state 0
Copies = Mapping[int, Mapping[int, int]]  # by state, by piece of it, the content


class BrokenPromise(AssertionError):  # noqa: N818 - what happened
    pass


def successor(content: int, epoch: int, state: int) -> int:
    return hash((content, epoch, state))


class Truth:
    def __init__(self, num_pieces: int) -> None:
        # By state: what was made and not dropped, and what of it the coordinator has heard of.
        self.made: dict[int, int] = {0: INITIAL}
        self.counted: dict[int, int] = {0: INITIAL}
        self.epochs: list[int] = []
        self.num_repeated = 0
        self._num_pieces = num_pieces
        self._parents: dict[int, int] = {}
        self._makers: dict[int, set[str]] = {}  # by content
        # States that nobody could tell of: all machines that made them were gone, and had left
        # copies to others.
        self._untold: set[int] = set()
        self._loaded: dict[int, int] = {}

    def begun(self, epoch: int, resume_step: int, here: Collection[str]) -> None:
        """`here` are the machines that can tell of what they have made."""
        if self.epochs and epoch <= self.epochs[-1]:
            raise BrokenPromise(f"epoch {epoch} begins after epoch {self.epochs[-1]}")
        self.epochs.append(epoch)
        if resume_step not in self.made:
            raise BrokenPromise(f"epoch {epoch} resumes at {resume_step}, which nobody has made")
        dropped = [state for state in self.made if state > resume_step]
        self.num_repeated += len(dropped)
        for state in dropped:
            del self.made[state]
            self.counted.pop(state, None)
        for state in self.made.keys() - self.counted.keys():
            if self._makers[self.made[state]].isdisjoint(here):
                self._untold.add(state)

    def best(self, copies: Iterable[Copies]) -> int | None:
        """The newest state that counts and is whole among `copies`."""
        held: dict[int, set[int]] = {}
        for machine in copies:
            for state, pieces in machine.items():
                content = self.made.get(state)
                same = {piece for piece, value in pieces.items() if value == content}
                held.setdefault(state, set()).update(same)
        whole = [state for state, pieces in held.items() if len(pieces) == self._num_pieces]
        return max(whole, default=None)

    def loaded(self, epoch: int, state: int, content: int) -> None:
        """A rank begins `epoch` with `content`."""
        first = self._loaded.setdefault(epoch, content)
        if content != first:
            raise BrokenPromise(f"epoch {epoch} begins with two contents of state {state}")
        if epoch == self.epochs[-1] and content != self.made[state]:
            raise BrokenPromise(f"epoch {epoch} begins with a dropped state {state}")

    def voted(self, epoch: int) -> None:
        if epoch != self.epochs[-1]:
            raise BrokenPromise(f"epoch {epoch} makes a step beside epoch {self.epochs[-1]}")

    def stepped(self, epoch: int, state: int, before: int, machine: str, *, alone: bool) -> int:
        """A rank on that machine has made the step to `state`; returns its content."""
        content = successor(before, epoch, state)
        self._parents[content] = before
        self._makers.setdefault(content, set()).add(machine)
        # A rank without others may be gone before its step is heard of, and leave a copy behind.
        if alone:
            self._untold.add(state)
        if epoch == self.epochs[-1]:
            self.made[state] = content
        return content

    def kept(self, state: int, content: int) -> None:
        """The coordinator counts `content` as the run's."""
        if self.made.get(state) != content:
            raise BrokenPromise(f"state {state} is counted of an epoch that was dropped")
        self.counted[state] = content

    def finished(self, num_steps: int) -> None:
        missing = set(range(num_steps + 1)) - self.counted.keys()
        missing -= self._untold
        if missing:
            raise BrokenPromise(f"the run is over and has no state {sorted(missing)}")
        for state in self.counted.keys() - {0}:
            if self._parents[self.counted[state]] != self.made[state - 1]:
                raise BrokenPromise(f"state {state} does not follow from the one before")
