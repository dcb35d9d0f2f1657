"""What cells and their children print, and what they tell the host, comes whole and in order (issue 3)."""

from __future__ import annotations

import pytest

from .conftest import Crowd, seeded, size

pytestmark = [pytest.mark.timeout(1700)]

PRELUDE = """
import os, subprocess, sys, threading
def forked(line):
    child = os.fork()
    if child == 0:
        os.write(1, line.encode())
        os._exit(0)
    os.waitpid(child, 0)
def started(line):
    subprocess.run(["printf", "%s", line])
def in_thread(line):
    thread = threading.Thread(target=print, args=(line,), kwargs={"end": ""})
    thread.start()
    thread.join()
def to_stderr(line):
    sys.stderr.write(line)
def raw(line):
    os.write(2, line.encode())
def printed(line):
    print(line, end="")
"""


@pytest.mark.parametrize("mode", ["session", "per_call"])
def test_nothing_is_lost_or_reordered(mode: str, storm) -> None:  # type: ignore[no-untyped-def]
    """Cells that print through streams, descriptors, threads and children: exactly their lines, in order."""
    chance = seeded(42)
    cells = size(200, 2000) if mode == "session" else size(20, 200)
    quick, slow = ["printed", "printed", "to_stderr", "raw", "in_thread"], ["forked", "forked", "started"]

    async def main(crowd: Crowd) -> None:
        for number in range(cells):
            lines, script = [], [] if mode == "session" and number else [PRELUDE]
            ways = [chance.choice(quick) for _ in range(chance.randrange(1, 12))]
            ways[len(ways) // 2 : len(ways) // 2] = [
                chance.choice(slow) for _ in range(chance.randrange(0, 3))
            ]
            for way in ways:
                line = f"{number} {len(lines)} {way} {'é' * chance.choice([0, 1, 300])}\n"
                lines.append(line)
                script.append(f"{way}({line!r})")
            if chance.random() < 0.1:
                script.append("raise SystemExit")
            result = await crowd.run("\n".join(script), max_output_bytes=1_000_000)
            output = "".join(lines)
            assert result.text.endswith(output), (number, script[1:], result.text)
            assert len(result.text) <= len(output) + len("Script raised SystemExit\n\n")

    storm(mode, main)


def test_big_output_is_complete_in_every_cell(storm) -> None:  # type: ignore[no-untyped-def]
    """More than the pipe holds, from the cell and a child in turns, with helper calls in between."""
    cells = size(6, 60)

    async def main(crowd: Crowd) -> None:
        for number in range(cells):
            result = await crowd.run(
                f"""
import subprocess, sys
for part in range(4):
    sys.stdout.write("a" * 700_000 + "\\n")
    subprocess.run(["sh", "-c", "head -c 300000 /dev/zero | tr '\\\\0' b; echo"])
    ls()
print("end", {number})
""",
                max_output_bytes=10_000_000,
            )
            assert "reason" not in result.details
            assert result.text == ("a" * 700_000 + "\n" + "b" * 300_000 + "\n") * 4 + f"end {number}\n"

    storm("session", main)


def test_every_block_and_notification_arrives(storm) -> None:  # type: ignore[no-untyped-def]
    """Thousands of text() blocks beside helper calls and output: all of them, in their order."""
    blocks = size(2000, 20_000)

    async def main(crowd: Crowd) -> None:
        for mode in ("session", "per_call"):
            crowd.mode = mode
            result = await crowd.run(
                f"for n in range({blocks}):\n    text(n)\n    if n % 100 == 0:\n        print(ls()[:9])",
                max_text_bytes=10_000_000,
                max_rpc_calls=blocks,
            )
            assert "reason" not in result.details
            told = result.text.partition("Script result (text()):\n")[2].partition("\n\nDiagnostics")[0]
            assert told == "\n".join(map(str, range(blocks)))
            assert result.text.endswith("Directory\n" * (blocks // 100))

    storm("session", main)
