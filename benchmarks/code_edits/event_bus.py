"""Publish and subscribe within one process."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

Handler = Callable[..., None]


class Subscription:
    """A handle that ends a subscription; also usable in a with statement."""

    def __init__(self, bus: EventBus, event: str, handler: Handler) -> None:
        self._bus = bus
        self.event = event
        self.handler = handler
        self.active = True

    def cancel(self) -> None:
        if self.active:
            self.active = False
            self._bus._remove(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class EventBus:
    """Handlers are called in the order in which they subscribed."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, list[Subscription]] = defaultdict(list)

    def on(self, event: str, handler: Handler) -> Subscription:
        """Call `handler` whenever `event` is published."""
        subscription = Subscription(self, event, handler)
        self._subscriptions[event].append(subscription)
        return subscription

    def publish(self, event: str, **details: Any) -> int:
        """Call every handler of an event; returns how many were called."""
        called = 0
        for subscription in list(self._subscriptions.get(event, ())):
            if not subscription.active:
                continue
            called += 1
            try:
                subscription.handler(**details)
            except RuntimeError:
                logger.exception("a handler of %s failed", event)
        return called

    def count(self, event: str) -> int:
        return len(self._subscriptions.get(event, ()))

    def clear(self) -> None:
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.active = False
        self._subscriptions.clear()

    def _remove(self, subscription: Subscription) -> None:
        self._subscriptions[subscription.event].remove(subscription)
        if not self._subscriptions[subscription.event]:
            del self._subscriptions[subscription.event]
