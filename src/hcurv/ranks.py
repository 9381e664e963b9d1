"""Work together with other processes: the only file that knows `torch.distributed`.

A *rank* is one process of a group that `torch.distributed` has connected. `ranks_of` makes a
`Ranks` of a group, or a `OneRank`, which does nothing, where there is no other process. Both have
the same methods, so that the same code runs in one process and in many.

Two rules keep ranks from waiting for one another for ever:

- Every rank makes the same calls in the same order.
- What can fail on one rank alone runs inside ``with ranks.agreed():``. At its end all ranks learn
  of the error, and all of them raise it, before anyone waits for data that will not come.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hcurv.memory import InsufficientMemoryError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OneRank", "Ranks", "RanksError", "Traffic", "ranks_of"]


# An error lists this many differences between ranks at the most.
_MOST_DIFFERENCES = 4
# Numbers are added up so many at a time.
_SUMMED = 2**20


class RanksError(RuntimeError):
    """The ranks of a process group do not work together: one has ended, or has other arguments.

    Examples:
        >>> issubclass(hcurv.RanksError, RuntimeError)
        True
    """


@dataclass
class Traffic:
    """What one kind of collective operation has cost this rank.

    Attributes:
        messages: the number of collective operations.
        num_bytes: the bytes of the tensors that this rank gave to them.
        seconds: the time that this rank spent in them, waiting included.
    """

    messages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class OneRank:
    """A group of one process, which has nobody to talk to: every operation returns its argument.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
        traffic: what collective operations have cost so far, by name.

    Examples:
        >>> from hcurv.ranks import ranks_of
        >>> ranks = ranks_of(None)
        >>> ranks.rank, ranks.size, ranks.sum(torch.ones(2))
        (0, 1, tensor([1., 1.]))
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = {}

    @property
    def first(self) -> bool:
        """Whether this is the rank that shows progress and warnings, writes files, and so on."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, on every rank; ``tensor`` itself is overwritten.

        All ranks receive the same bits.

        Args:
            tensor: of the same shape and type on every rank.
        """
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in the order of the ranks, on every rank.

        Args:
            tensor: its first axis may differ in length between ranks, and be empty.
        """
        return [tensor]

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in the order of the ranks, on every rank."""
        return [text]

    def scatter_sum(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum of a tensor over all ranks, of which each rank receives its own rows.

        Rows are given out in the order of the ranks.

        Args:
            tensor: (m, …), of the same shape and type on every rank.
            counts: the number of rows that each rank receives, the same on every rank; their sum
                is m.

        Returns:
            (counts[rank], …).
        """
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of one rank, on every rank; ``tensor`` itself is overwritten.

        Args:
            tensor: of the same shape and type on every rank.
            source: the rank whose values are sent.
        """
        return tensor

    def agree(self, error: Exception | None = None, **arguments: Tensor) -> None:
        """Let every rank raise an error that any rank has met; return where there is none.

        The rank that met it raises it as it is. The others raise one of the same kind, where it is
        a kind of Python's own or of this package's, whose text names the rank.

        Args:
            error: what this rank has met, or None.
            arguments: tensors that all ranks must have passed alike, by name.

        Raises:
            RanksError: some ranks have other arguments. They are compared by their shapes and by
                a sum of their bits, which costs one look at them.
        """
        if error is not None:
            raise error

    @contextmanager
    def agreed(self, **arguments: Tensor) -> Iterator[None]:
        """Run a block that can fail on some ranks, and end it with `agree` on all of them.

        The block itself must not wait for other ranks.

        Args:
            arguments: tensors that all ranks must have passed alike, by name.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.agree(error, **arguments)

    def most(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """The largest of each of some numbers over all ranks, on every rank.

        Decisions that depend on time or on free memory are made from such numbers, so that all
        ranks decide alike.
        """
        return tuple(numbers)

    def same(self, **values: object) -> None:
        """Make sure that all ranks have the same values; the error names those that differ.

        Args:
            values: what to compare, by name: tensors, by their contents, or anything else, by its
                ``repr``.

        Raises:
            RanksError: some ranks have other values.

        Examples:
            >>> ranks_of(None).same(tolerance=1e-3, seed=0)
        """

    def collect(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, one after the other, on every rank.

        It is `gather` for numbers of rows that all ranks know, which saves a message.

        Args:
            tensor: (counts[rank], …).
            counts: the number of rows of each rank, the same on every rank.
        """
        return tensor


class Ranks(OneRank):
    """The processes of a group, each of which makes the same calls in the same order.

    Args:
        group: a process group, such as ``torch.distributed.group.WORLD``.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        from torch import distributed

        self._group, self._torch = group, distributed
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is not in the process_group that it was given")
        # NCCL sends nothing but what lies on a GPU.
        backend = str(distributed.get_backend(group))
        on_gpu = "nccl" in backend and "gloo" not in backend
        self._place = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce."""
        sent = self._sendable(tensor)
        self._call("sum", sent, lambda: self._torch.all_reduce(sent, group=self._group))
        return tensor if sent is tensor else tensor.copy_(sent)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """All-gather of the lengths, then of the tensors, filled up to the longest."""
        length = torch.tensor([tensor.shape[0]])
        lengths = [int(n) for n in self._gather_equal("gather lengths", length)]
        longest = max(lengths)
        filled = tensor
        if tensor.shape[0] < longest:
            filled = tensor.new_zeros(longest, *tensor.shape[1:])
            filled[: tensor.shape[0]] = tensor
        if filled.numel() == 0:
            return [filled[:n] for n in lengths]
        pieces = self._gather_equal("gather", filled)
        return [piece[:n] for piece, n in zip(pieces, lengths, strict=True)]

    def scatter_sum(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """Each rank sends the others their rows, and adds what it receives.

        This moves as many bytes as a reduce-scatter, allows different numbers of rows, and adds
        in the order of the ranks. Not every back end has a reduce-scatter.
        """
        if len(counts) != self.size or sum(counts) != tensor.shape[0]:
            raise ValueError(
                f"counts must name {self.size} numbers of rows that add up to {tensor.shape[0]};"
                f" got {list(counts)}"
            )
        sent = self._sendable(tensor).view(tensor.shape[0], -1)
        own, width = counts[self.rank], sent.shape[1]
        received = sent.new_empty(self.size * own * width)
        self._call(
            "scatter_sum",
            sent,
            lambda: self._torch.all_to_all_single(
                received,
                sent.view(-1),
                [own * width] * self.size,
                [count * width for count in counts],
                group=self._group,
            ),
        )
        total = received.view(self.size, own * width).sum(0)
        return total.view(own, *tensor.shape[1:]).to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Broadcast."""
        sent = self._sendable(tensor)
        origin = self._torch.get_global_rank(self._group, source)
        self._call("broadcast", sent, lambda: self._torch.broadcast(sent, origin, self._group))
        return tensor if sent is tensor else tensor.copy_(sent)

    def agree(self, error: Exception | None = None, **arguments: Tensor) -> None:
        """One sum of a flag and a digest for each rank; texts follow only if there is an error."""
        states = torch.zeros(self.size, 2, dtype=torch.int64)
        states[self.rank, 0] = error is not None
        states[self.rank, 1] = _bit_sum(arguments)
        sent = self._sendable(states)
        self._call("agree", sent, lambda: self._torch.all_reduce(sent, group=self._group))
        flags, digests = sent.cpu().T
        failed = flags.nonzero()[:, 0].tolist()
        if not failed:
            others = (digests != digests[0]).nonzero()[:, 0].tolist()
            if others:
                raise RanksError(
                    f"all ranks must pass the same {' and '.join(arguments)}; those of ranks"
                    f" {_listed(others)} differ from those of rank 0"
                )
            return
        text = "" if error is None else f"{_kind(error)}\n{error}"
        texts = self.gather_texts(text)
        if error is not None:
            raise error
        kind, _, message = texts[failed[0]].partition("\n")
        others = f" (and ranks {_listed(failed[1:])})" if failed[1:] else ""
        raise _KINDS.get(kind, RanksError)(f"rank {failed[0]}{others}: {message}")

    def most(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Gather, and take the largest."""
        own = torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        return tuple(torch.stack(self._gather_equal("most", own)).amax(0).tolist())

    def same(self, **values: object) -> None:
        """Gather one digest, and if digests differ, what they are made of."""
        text = json.dumps({name: _described(value) for name, value in values.items()})
        digest = bytearray(hashlib.sha256(text.encode()).digest())
        digests = self._gather_equal("same", torch.frombuffer(digest, dtype=torch.uint8))
        if all(torch.equal(digests[0], other) for other in digests[1:]):
            return
        everywhere = [json.loads(found) for found in self.gather_texts(text)]
        differences = []
        for name in dict.fromkeys(name for found in everywhere for name in found):
            holders: dict[str, list[int]] = {}
            for rank, found in enumerate(everywhere):
                holders.setdefault(found.get(name, "absent"), []).append(rank)
            if len(holders) > 1:
                parts = [f"{value} on ranks {_listed(some)}" for value, some in holders.items()]
                differences.append(f"{name} is " + ", but ".join(parts))
        more = len(differences) - _MOST_DIFFERENCES
        listed = "; ".join(differences[:_MOST_DIFFERENCES])
        raise RanksError(
            "all ranks of a process group must pass the same arguments; "
            + listed
            + (f"; and {more} more differ" if more > 0 else "")
        )

    def collect(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """All-gather of tensors that are filled up to the longest."""
        longest = max(counts)
        filled = tensor
        if tensor.shape[0] < longest:
            filled = tensor.new_zeros(longest, *tensor.shape[1:])
            filled[: tensor.shape[0]] = tensor
        if filled.numel() == 0:
            return tensor.new_zeros(sum(counts), *tensor.shape[1:])
        pieces = self._gather_equal("gather", filled)
        return torch.cat([piece[:n] for piece, n in zip(pieces, counts, strict=True)])

    def _gather_equal(self, name: str, tensor: Tensor) -> list[Tensor]:
        """All-gather of tensors of one shape."""
        sent = self._sendable(tensor)
        pieces = [torch.empty_like(sent) for _ in range(self.size)]
        self._call(name, sent, lambda: self._torch.all_gather(pieces, sent, group=self._group))
        return [piece.to(tensor.device) for piece in pieces]

    def gather_texts(self, text: str) -> list[str]:
        """Texts as bytes."""
        own = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        return [bytes(piece.tolist()).decode()[:-1] for piece in self.gather(own)]

    def _sendable(self, tensor: Tensor) -> Tensor:
        """The tensor, contiguous, and where this group can send it from."""
        return tensor.to(self._place or tensor.device).contiguous()

    def _call(self, name: str, sent: Tensor, collective: Callable[[], object]) -> None:
        """Run a collective operation, count it, and explain its failure."""
        cost = self.traffic.setdefault(name, Traffic())
        cost.messages += 1
        cost.num_bytes += sent.numel() * sent.element_size()
        start = time.perf_counter()
        try:
            collective()
        except RuntimeError as error:
            raise RanksError(
                f"rank {self.rank} of {self.size} lost the others ({name}): one of them has ended,"
                " or did not come within the timeout of the process group; look for the first"
                f" error among all ranks. torch says: {error}"
            ) from error
        cost.seconds += time.perf_counter() - start


def ranks_of(process_group: ProcessGroup | None) -> OneRank:
    """The ranks of a process group; `OneRank` if it is None or has one process.

    Without ``torchrun``, ``torch.distributed.group.WORLD`` is None, so it can always be passed.

    Args:
        process_group: a group of `torch.distributed`, or None.

    Raises:
        TypeError: this is no process group.

    Examples:
        >>> from hcurv.ranks import ranks_of
        >>> ranks_of(torch.distributed.group.WORLD).size
        1
    """
    if process_group is None:
        return OneRank()
    from torch import distributed

    if not distributed.is_available() or not isinstance(process_group, distributed.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, such as"
            f" torch.distributed.group.WORLD, or None; got {type(process_group).__name__}"
        )
    ranks = Ranks(process_group)
    return ranks if ranks.size > 1 else OneRank()


# The kinds of errors that a rank can raise for another one. Of a kind that is not among them, the
# closest one that it is derived from is raised.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ArithmeticError,
        AssertionError,
        FileNotFoundError,
        IndexError,
        InsufficientMemoryError,
        KeyError,
        MemoryError,
        NotImplementedError,
        OSError,
        RanksError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


def _kind(error: Exception) -> str:
    """The name of the closest kind that other ranks can raise too."""
    known = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    return next(known, RanksError.__name__)


def _described(value: object) -> str:
    """Tensors by their contents, everything else as it prints."""
    if not isinstance(value, Tensor):
        return repr(value)
    contents = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(contents.data).hexdigest()[:12]
    return f"a tensor {tuple(value.shape)} of {value.dtype} with digest {digest}"


def _bit_sum(arguments: dict[str, Tensor]) -> int:
    """A number that differs between most tensors that differ, and is the same on all machines."""
    total = 0
    for tensor in arguments.values():
        for number in (tensor.ndim, *tensor.shape):
            total = (total * 1_000_003 + number) % 2**61
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = tensor.detach().contiguous().view(whole[tensor.element_size()])
        # torch converts what it adds up, so that a whole tensor would take twice its memory again.
        for part in bits.view(-1).split(_SUMMED):
            total = (total + int(part.sum(dtype=torch.int64))) % 2**61
    return total


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
