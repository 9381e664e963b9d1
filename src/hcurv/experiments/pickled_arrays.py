"""Read pickled dictionaries of lists and byte arrays without executing anything.

A pickle is a program for a small stack machine, and `pickle.load` lets it call any function. This
module only looks at the program, with `pickletools.genops`. It follows the few instructions that
the Python batches of CIFAR-10 consist of, and never looks up the name of a function. Everything
else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["read_pickled_dict"]


@dataclass(frozen=True)
class _Name:
    """The name of something that a pickle refers to. The name is never looked up."""

    name: str


_ENCODE, _DTYPE, _NDARRAY = _Name("_codecs encode"), _Name("numpy dtype"), _Name("numpy ndarray")
_RECONSTRUCT = [_Name(f"numpy.{core}.multiarray _reconstruct") for core in ("core", "_core")]
_KNOWN = [_ENCODE, _DTYPE, _NDARRAY, *_RECONSTRUCT]
_EMPTY_ARRAY, _UINT8 = _Name("an array before its values are set"), _Name("the data type uint8")

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
# The first two are Python 2's strings, which arrive as text with one character for each byte.
_VALUES = {"SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "BININT", "BININT1", "BININT2"}


def read_pickled_dict(content: bytes) -> dict[Any, Any]:
    """Read the dictionary in a pickle of protocol 2, as Python 2 and 3 write it with NumPy.

    Args:
        content: the pickle. It may hold dictionaries, lists, tuples, integers, strings and arrays
            of type uint8.

    Raises:
        ValueError: the pickle is damaged, or holds anything else. Nothing of it has been executed.
    """
    try:
        result = _follow(content)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"no well-formed pickle: {error}") from error
    if not isinstance(result, dict):
        raise ValueError(f"a pickled {type(result).__name__} instead of a dictionary")
    return result


def _follow(content: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    instructions: Iterator[tuple[Any, Any, Any]] = pickletools.genops(content)
    for opcode, argument, _ in instructions:
        code = opcode.name
        if code in _VALUES:
            stack.append(argument)
        elif code in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _TUPLES:
            stack.append(tuple(_pop(stack, _TUPLES[code])))
        elif code == "TUPLE":
            stack.append(tuple(_pop_to_mark(stack)))
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code in ("APPEND", "APPENDS"):
            values = _pop(stack, 1) if code == "APPEND" else _pop_to_mark(stack)
            stack[-1].extend(values)
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code in ("SETITEM", "SETITEMS"):
            values = _pop(stack, 2) if code == "SETITEM" else _pop_to_mark(stack)
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif code == "GLOBAL":
            if _Name(argument) not in _KNOWN:
                raise ValueError(f"a pickle that asks for {argument.replace(' ', '.')!r}")
            stack.append(_Name(argument))
        elif code == "REDUCE":
            stack.append(_call(*_pop(stack, 2)))
        elif code == "BUILD":
            stack.append(_build(*_pop(stack, 2)))
        elif code == "STOP":
            (result,) = _pop(stack, 1)
            return result
        elif code != "PROTO" or argument != 2:
            raise ValueError(f"a pickle with the unknown instruction {code}")
    raise AssertionError("genops ends with STOP")


def _pop(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        raise IndexError("too few values")
    stack[len(stack) - count :], values = [], stack[len(stack) - count :]
    return values


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    for count, value in enumerate(reversed(stack)):
        if value is _MARK:
            return _pop(stack, count + 1)[1:]
    raise IndexError("too few marks")


def _call(function: Any, arguments: Any) -> Any:
    """Return what a call of one of the three known functions would return."""
    if function == _ENCODE and arguments[1:] == ("latin1",):
        return arguments[0].encode("latin1")
    if function == _DTYPE and arguments[0] == "u1":
        return _UINT8
    if function in _RECONSTRUCT and arguments[0] == _NDARRAY:
        return _EMPTY_ARRAY
    raise ValueError(f"a pickle that calls {function} with unknown arguments")


def _build(target: Any, state: Any) -> Any:
    """Return what ``target`` would be after its state is set."""
    if target == _UINT8:  # its state is the byte order, which single bytes do not have
        return _UINT8
    if target != _EMPTY_ARRAY:
        raise ValueError("a pickle that sets the state of something else than an array")
    _, shape, dtype, by_columns, values = state
    if dtype != _UINT8 or by_columns:
        raise ValueError("a pickled array that is not uint8 by rows")
    content = values.encode("latin1") if isinstance(values, str) else values
    return np.frombuffer(content, np.uint8).reshape(shape)
