"""Types of actor handles: a misspelt remote call is a type error, with no signature written twice.

A handle's class takes the methods of its actor's class::

    class ShardHandle:
        sample = remote_method(ReplayShard.sample)

At run time handles are Ray's: these classes are for annotations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reference(Protocol[T_co]):
    """Reference of a result: awaitable, or for ``ray.get``."""

    def __await__(self) -> Generator[Any, None, T_co]:
        """Wait for the result."""


class RemoteMethod(Protocol[P, T_co]):
    """A method of a handle."""

    def remote(self, *arguments: P.args, **named: P.kwargs) -> Reference[T_co]:
        """Call the method; returns at once."""


@overload
def remote_method(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> RemoteMethod[P, T]: ...
@overload
def remote_method(method: Callable[Concatenate[Any, P], T]) -> RemoteMethod[P, T]: ...
def remote_method(method: Any) -> Any:
    """The handle's counterpart of a method of an actor's class."""
    return method
