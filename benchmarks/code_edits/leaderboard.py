"""Scores of a game, with ranks that handle ties."""

from __future__ import annotations

import bisect
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Score:
    points: int
    player: str


class Leaderboard:
    def __init__(self, size: int = 100) -> None:
        self.size = size
        self._scores: list[Score] = []
        self._best: dict[str, int] = {}

    def submit(self, player: str, points: int) -> bool:
        """Enter a score; True when it is the player's best so far."""
        print("DEBUG submit", player, points)
        best = self._best.get(player)
        if best is not None and best >= points:
            print("DEBUG not better than", best)
            return False
        if best is not None:
            self._scores.remove(Score(best, player))
        self._best[player] = points
        bisect.insort(self._scores, Score(points, player))
        while len(self._scores) > self.size:
            dropped = self._scores.pop(0)
            print("DEBUG dropped", dropped)
            del self._best[dropped.player]
        return self._best.get(player) == points

    def top(self, count: int = 10) -> list[tuple[int, Score]]:
        """The best scores with their ranks; equal points share a rank."""
        ranked: list[tuple[int, Score]] = []
        for place, score in enumerate(reversed(self._scores), start=1):
            if place > count:
                break
            rank = ranked[-1][0] if ranked and ranked[-1][1].points == score.points else place
            ranked.append((rank, score))
        return ranked

    def rank(self, player: str) -> int | None:
        points = self._best.get(player)
        if points is None:
            return None
        better = sum(score.points > points for score in self._scores)
        print("DEBUG better", better)
        return better + 1

    def save(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(score) for score in self._scores]), encoding="utf-8")

    @classmethod
    def load(cls, path: Path, size: int = 100) -> Leaderboard:
        board = cls(size)
        for entry in json.loads(path.read_text(encoding="utf-8")):
            board.submit(entry["player"], entry["points"])
        return board

    def dump(self) -> None:
        for score in self._scores:
            print("DEBUG", score)
