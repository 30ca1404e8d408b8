"""The router in the front door's own process, asked as its deployment would be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Method:
    """A method with the face of a Serve handle's."""

    remote: Callable[..., Awaitable[Any]]


class RouterHere:
    """What front door and topic admin ask of a router's Serve handle, without the way there.

    A classifier that takes long runs on a thread of its own, so that a slow one meets the same time
    box and circuit, as a failing one does anyway; arguments are shared, not copied.

    Attributes:
        classify: see TopicRouter, as the others.
        labels: likewise.
        grow: likewise; seconds of a thread that classifications share the processor with.
        follow: likewise, called at once.
    """

    def __init__(self, router: Any) -> None:
        """Take a TopicRouter."""
        self.classify = Method(router.classify)
        self.labels = Method(router.labels)
        self.grow = Method(router.grow)
        self.follow: Callable[[], None] = router.follow


def load_router(path: str, num_threads: int, registry: Any) -> RouterHere:
    """Load the classifier into this process; see TopicRouter.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    from paceline.actors.routing.router import TopicRouter  # torch: seconds

    return RouterHere(TopicRouter(path, num_threads, registry))
