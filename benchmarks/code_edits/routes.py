"""Routes through a network of stations."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque


class NoRoute(Exception):
    """There is no way from one station to the other."""


class Network:
    def __init__(self) -> None:
        self._links: dict[str, dict[str, float]] = defaultdict(dict)

    def connect(self, a: str, b: str, minutes: float) -> None:
        """Join two stations in both directions; the shorter of two links stays."""
        if minutes < 0:
            raise ValueError(f"a link cannot take {minutes} minutes")
        known = self._links[a].get(b, minutes)
        self._links[a][b] = self._links[b][a] = min(known, minutes)

    def stations(self) -> list[str]:
        return sorted(self._links)

    def reachable(self, start: str) -> set[str]:
        """Every station that can be reached, `start` included."""
        seen = {start}
        waiting = deque([start])
        while waiting:
            for neighbour in self._links[waiting.popleft()]:
                if neighbour not in seen:
                    seen.add(neighbour)
                    waiting.append(neighbour)
        return seen

    def fastest(self, start: str, goal: str) -> tuple[float, list[str]]:
        """Minutes and stations of the fastest route.

        Raises NoRoute when the goal cannot be reached.
        """
        minutes = {start: 0.0}
        came_from: dict[str, str] = {}
        queue = [(0.0, start)]
        while queue:
            so_far, station = heapq.heappop(queue)
            if station == goal:
                return so_far, self._trace(came_from, goal)
            if so_far > minutes[station]:
                continue
            for neighbour, link in self._links[station].items():
                total = so_far + link
                if total < minutes.get(neighbour, float("inf")):
                    minutes[neighbour] = total
                    came_from[neighbour] = station
                    heapq.heappush(queue, (total, neighbour))
        raise NoRoute(f"{goal} cannot be reached from {start}")

    def describe(self, start: str, goal: str) -> str:
        try:
            minutes, stations = self.fastest(start, goal)
        except NoRoute as error:
            return str(error)
        return f"{' - '.join(stations)} ({minutes:g} minutes)"

    @staticmethod
    def _trace(came_from: dict[str, str], goal: str) -> list[str]:
        route = [goal]
        while route[-1] in came_from:
            route.append(came_from[route[-1]])
        return route[::-1]
