"""Reads, shifts and writes subtitle files in the SRT format."""

import re
from itertools import pairwise

TIME = re.compile(r"(\d+):(\d\d):(\d\d),(\d{3})")
ARROW = " --> "


class Cue:
    def __init__(self, start, end, lines):
        self.start = start
        self.end = end
        self.lines = lines

    def shifted(self, milliseconds):
        return Cue(max(self.start + milliseconds, 0), max(self.end + milliseconds, 0), self.lines)

    def __repr__(self):
        return f"Cue({format_time(self.start)}, {self.lines!r})"


def parse_time(text):
    match = TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a time: {text!r}")
    hours, minutes, seconds, millis = map(int, match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1000 + millis


def format_time(milliseconds):
    seconds, millis = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02},{millis:03}"


def parse(text):
    cues = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if len(lines) < 2 or ARROW not in lines[1]:
            raise ValueError(f"not a cue: {block[:40]!r}")
        start, end = lines[1].split(ARROW)
        cues.append(Cue(parse_time(start), parse_time(end), lines[2:]))
    return cues


def write(cues):
    blocks = []
    for number, cue in enumerate(cues, start=1):
        span = f"{format_time(cue.start)}{ARROW}{format_time(cue.end)}"
        blocks.append("\n".join([str(number), span, *cue.lines]))
    return "\n\n".join(blocks) + "\n"


def overlaps(cues):
    ordered = sorted(cues, key=lambda cue: cue.start)
    return [(a, b) for a, b in pairwise(ordered) if b.start < a.end]
