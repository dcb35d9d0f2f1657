"""``text()`` is the result, the rest is diagnostics, ``notify()`` is for whoever watches (cases section 8)."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from lemon_kernel import ToolUpdate

from .conftest import Agent, wait_until

RESULT = "Script result (text()):\n"
DIAGNOSTICS = "Diagnostics (stdout/stderr, not the result):\n"
NOTHING = "(script produced no output)"


def with_blocks(blocks: str, diagnostics: str = NOTHING) -> str:
    """Return the text of a run that emitted blocks (behaviour 2.6: exactly one empty line between the parts)."""
    start = RESULT + blocks
    return start + ("\n" if start.endswith("\n") else "\n\n") + DIAGNOSTICS + diagnostics


class Updates(list[str]):
    """An ``on_update`` callback that remembers what it was told."""

    def __call__(self, update: ToolUpdate) -> None:
        self.append(update.text)


# -- text() -------------------------------------------------------------------------------------------------


@pytest.mark.case(175)
def test_blocks_come_first_and_prints_are_diagnostics(agent: Agent) -> None:
    """Blocks stand under their label, everything printed under the other one."""
    result = agent.run("print('noise')\ntext('A')\ntext('B')\nprint('more')")

    assert result.text == with_blocks("A\nB", "noise\nmore\n")
    assert result.details.get("reason") is None


@pytest.mark.case(176)
def test_diagnostics_without_output(agent: Agent) -> None:
    """Nothing printed is said to be nothing."""
    assert agent.run("text('A')").text == with_blocks("A")


@pytest.mark.case(177)
def test_exit_code_comes_before_blocks(per_call: Agent) -> None:
    """With blocks the headline of a status comes first."""
    result = per_call.run("import sys; text('A'); sys.exit(3)")

    assert result.text == f"Script exited with code 3\n\n{with_blocks('A')}"
    assert result.details["exit_code"] == 3


@pytest.mark.case(178)
def test_blocks_survive_a_timeout(agent: Agent) -> None:
    """What text() took is in the result of a run that was cut short, and so is what was printed."""
    agent.run("pass")  # the time is the script's, not that of a kernel's start
    result = agent.run("text('partial'); print('so far')\nwhile True: pass", timeout_ms=2000)

    assert result.text == f"Script timed out after 2000ms.\n\n{with_blocks('partial', 'so far' + chr(10))}"
    assert result.details["reason"] == "timeout"


@pytest.mark.case(179)
def test_blocks_survive_an_abort(agent: Agent) -> None:
    """The same holds for an abort."""
    run = agent.start("import time; text('partial'); open('started', 'w'); time.sleep(30)")
    wait_until((agent.cwd / "started").exists, 20)
    run.abort()

    assert run.result().text == f"Script cancelled.\n\n{with_blocks('partial')}"


@pytest.mark.case(181)
def test_blocks_survive_an_exception(agent: Agent) -> None:
    """The same holds for an exception, whose traceback is the diagnostics."""
    result = agent.run("text('p')\nraise ValueError('x')")

    headline = "Script exited with code 1" if agent.mode == "per_call" else "Script raised ValueError: x"
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "<cell 1>", line 3, in <module>\n'
        "    raise ValueError('x')\n"
        "ValueError: x\n"
    )
    assert result.text == f"{headline}\n\n{with_blocks('p', traceback)}"


def test_blocks_survive_a_crash(agent: Agent) -> None:
    """The host holds the blocks: they outlive an interpreter that ends without a word (behaviour 2.6)."""
    result = agent.run("import os; text('kept'); os._exit(9)")

    if agent.mode == "per_call":
        headline = "Script exited with code 9"
    else:
        headline = "execute_code session failed: kernel_died"
    assert result.text == f"{headline}\n\n{with_blocks('kept')}"


@pytest.mark.case(182)
def test_text_budget_can_be_used_up_exactly(agent: Agent) -> None:
    """A block that is charged exactly the budget is taken."""
    result = agent.run("text('0123456789')", config={"max_text_bytes": 30})

    assert result.text == with_blocks("0123456789")


@pytest.mark.case(183)
def test_text_over_budget(agent: Agent) -> None:
    """A block that does not fit is refused with the numbers; those before it stay."""
    result = agent.run(
        "text('0123456789')\ntry:\n    text('X' * 40)\nexcept ToolError as error:\n    print(error, error.tool)",
        config={"max_text_bytes": 64},
    )

    message = "text() byte budget exceeded (30 bytes accumulated, 60 more requested, cap 64)"
    assert result.text == with_blocks("0123456789", f"{message} text\n")


@pytest.mark.case(184)
def test_refused_text_costs_nothing(agent: Agent) -> None:
    """A refused block takes neither bytes nor a number; a smaller one fits afterwards."""
    result = agent.run(
        "text('0123456789')\ntry:\n    text('X' * 40)\nexcept ToolError:\n    pass\ntext('ok')",
        config={"max_text_bytes": 64},
    )

    assert result.text == with_blocks("0123456789\nok")


@pytest.mark.case(318)
def test_host_keeps_the_text_budget_too(agent: Agent) -> None:
    """Frames that pass the script's side by are charged by the host: the second of 60 bytes is over 100."""
    result = agent.run(
        "from lemon_tools import _raw\n"
        "for n in (1, 2):\n"
        "    answer = _raw({'type': 'text', 'id': 900 + n, 'token': _raw.token, 'n': n, 'text': str(n) * 40})\n"
        "    print(answer['ok'], answer['content'])\n"
        "text('abcd')",
        config={"max_text_bytes": 100},
    )

    refusal = "text() byte budget exceeded (60 bytes accumulated, 60 more requested, cap 100)"
    assert result.text == with_blocks("1" * 40 + "\nabcd", f"True \nFalse {refusal}\n")
    assert result.details["rpc_calls"] == 0


@pytest.mark.case(186)
def test_text_is_charged_as_encoded(agent: Agent) -> None:
    """What counts is the encoded size: 11,000 NULs are six bytes each."""
    result = agent.run(
        'try:\n    text("\\0" * 11000)\nexcept ToolError as error:\n    print(error)',
        config={"max_text_bytes": 65536},
    )

    assert result.text == (
        "text() byte budget exceeded (0 bytes accumulated, 66020 more requested, cap 65536)\n"
    )


@pytest.mark.case(319)
def test_surrogates(agent: Agent) -> None:
    """A surrogate becomes U+FFFD in a block and is refused by name in a parameter; the run goes on."""
    result = agent.run(
        'text("a\\ud800b")\n'
        'try:\n    read("x\\ud800")\nexcept ToolError as error:\n    print(error, error.tool)\n'
        'text("after")'
    )

    assert result.text.startswith(f"{RESULT}a\ufffdb\nafter\n\n{DIAGNOSTICS}")
    message = result.text.rsplit("\n", 2)[1]
    assert "'path'" in message
    assert "surrogate" in message
    assert message.endswith(" read")
    assert result.details["rpc_calls"] == 0


@pytest.mark.case(188)
def test_text_takes_anything(agent: Agent) -> None:
    """What is no string goes through ``str()``."""
    assert agent.run("text(42); text([1]); text(None)").text == with_blocks("42\n[1]\nNone")


@pytest.mark.case(189)
def test_empty_block_counts(agent: Agent) -> None:
    """An empty block is a result, with an empty body; no block is changed on its way."""
    assert agent.run("text('')").text == f"{RESULT}\n{DIAGNOSTICS}{NOTHING}"
    assert agent.run("text('a\\n')").text == f"{RESULT}a\n\n{DIAGNOSTICS}{NOTHING}"
    assert agent.run("text(' a\\n\\n'); text('')").text == f"{RESULT} a\n\n\n\n{DIAGNOSTICS}{NOTHING}"


@pytest.mark.case(190)
def test_text_from_threads(agent: Agent) -> None:
    """Twenty threads at once give twenty intact blocks, and numbers go on after them."""
    result = agent.run(
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "start = threading.Barrier(10)\n"
        "def send(n):\n    start.wait(10)\n    text(f'<{n:02}>' + 'x' * 200)\n"
        "threads = [threading.Thread(target=send, args=(n,)) for n in range(10)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "with ThreadPoolExecutor(10) as pool:\n    list(pool.map(send, range(10, 20)))\n"
        "text('last')"
    )

    assert result.text.endswith(f"\n\n{DIAGNOSTICS}{NOTHING}")
    blocks = result.text.removeprefix(RESULT).split("\n\n", 1)[0].split("\n")
    assert blocks[-1] == "last"
    assert sorted(blocks[:10]) == [f"<{n:02}>" + "x" * 200 for n in range(10)]
    assert sorted(blocks[10:20]) == [f"<{n:02}>" + "x" * 200 for n in range(10, 20)]
    assert len(blocks) == 21


@pytest.mark.case(191)
def test_text_costs_no_call(agent: Agent) -> None:
    """Blocks are not helper calls."""
    result = agent.run("for n in range(5): text(n)\nls()", config={"max_rpc_calls": 1})

    assert result.text == with_blocks("0\n1\n2\n3\n4")
    assert result.details["rpc_calls"] == 1
    assert result.details["rpc_errors"] == 0


@pytest.mark.case(192)
def test_each_cell_has_its_own_text_budget(session: Agent) -> None:
    """A cell that used its budget up takes nothing from the next one."""
    first = session.run("text('x' * 44)", config={"max_text_bytes": 64})
    second = session.run("text('0123456789')", config={"max_text_bytes": 64})

    assert first.text == with_blocks("x" * 44)
    assert second.text == with_blocks("0123456789")
    assert second.details["kernel_reused"] is True


@pytest.mark.case(193)
def test_without_text_nothing_is_labelled(agent: Agent) -> None:
    """A script that only prints gets what it printed."""
    assert agent.run("print('only printed')").text == "only printed\n"


# -- notify() -----------------------------------------------------------------------------------------------


@pytest.mark.case(194)
def test_notify_is_forwarded_during_the_run(agent: Agent) -> None:
    """Messages arrive in order while the script still runs, and are no part of the result."""
    updates = Updates()
    run = agent.start(
        "import os, time\nnotify('one'); notify('two')\n"
        "while not os.path.exists('seen'): time.sleep(0.01)\nprint('end')",
        on_update=updates,
    )
    wait_until(lambda: len(updates) == 2, 20, "two updates during the run")
    assert not run.done
    (agent.cwd / "seen").touch()

    assert run.result().text == "end\n"
    assert updates == ["notify: one", "notify: two"]


@pytest.mark.case(195)
def test_notify_as_the_last_statement(agent: Agent) -> None:
    """A message is forwarded even if the script ends right after it."""
    updates = Updates()
    result = agent.run("notify('last')", on_update=updates)

    assert result.text == NOTHING
    assert updates == ["notify: last"]


@pytest.mark.case(195)
@pytest.mark.parametrize("end", ["", "import os; os._exit(0)"], ids=["end", "exit"])
def test_frames_sent_right_before_the_end(per_call: Agent, end: str) -> None:
    """What the socket holds when the script is over is still taken, though nobody waited for it (5.5)."""
    updates = Updates()
    result = per_call.run(
        "from lemon_tools import _raw\n"
        "t = _raw.token\n"
        "for n in range(20):\n    _raw({'type': 'notify', 'token': t, 'msg': str(n)})\n"
        f"_raw({{'type': 'text', 'token': t, 'n': 1, 'text': 'last words'}})\n{end}",
        on_update=updates,
    )

    assert updates == [f"notify: {n}" for n in range(20)]
    assert with_blocks("last words") in result.text


@pytest.mark.case(196)
def test_notify_without_a_listener(agent: Agent) -> None:
    """Without a callback messages are taken and thrown away, at no cost to the run."""
    begun = time.monotonic()
    result = agent.run("for n in range(20): notify(n)\nprint('fine')")

    assert result.text == "fine\n"
    assert time.monotonic() - begun < 5
    assert result.details["rpc_denied"] == result.details["rpc_errors"] == 0


@pytest.mark.case(197)
def test_notify_is_capped_in_number(agent: Agent) -> None:
    """The first 64 messages of a run are forwarded, the rest is dropped without a word."""
    updates = Updates()
    result = agent.run("for n in range(70): notify(n)\nprint('fine')", on_update=updates)

    assert updates == [f"notify: {n}" for n in range(64)]
    assert result.text == "fine\n"


@pytest.mark.case(197)
def test_notify_is_capped_in_length(agent: Agent) -> None:
    """A message is cut to 4096 bytes of UTF-8, never inside a character."""
    updates = Updates()
    agent.run(
        "notify('x' * 10000); notify('漢' * 10000); notify('a\\ud800b'); notify(None)", on_update=updates
    )

    assert updates == [
        "notify: " + "x" * 4096,
        "notify: " + "漢" * 1365,
        "notify: a\ufffdb",
        "notify: None",
    ]


@pytest.mark.case(198)
def test_notify_cap_spans_the_whole_run(agent: Agent) -> None:
    """The cap is of the run, not of a stretch of time."""
    updates = Updates()
    agent.run(
        "import time\nfor n in range(40): notify(n)\ntime.sleep(0.3)\nfor n in range(40, 70): notify(n)",
        on_update=updates,
    )

    assert updates == [f"notify: {n}" for n in range(64)]


@pytest.mark.case(200)
def test_malformed_notify_frames_are_dropped(agent: Agent) -> None:
    """Junk is not forwarded, does not use up the cap and counts nowhere as denied."""
    updates = Updates()
    result = agent.run(
        "from lemon_tools import _raw\n"
        "t = _raw.token\n"
        "junk = [{}, {'msg': 42}, {'msg': None}, {'msg': ['x']}, {'msg': 'bad', 'token': 'wrong'},\n"
        "        {'msg': 'bad', 'token': None}, {'msg': 'x' * 300000}]\n"
        "for n in range(70):\n"
        "    _raw({'type': 'notify', 'token': t, **junk[n % 6]})\n"
        "_raw({'type': 'notify', 'token': t, **junk[6]})\n"
        "for n in range(65): notify(n)\n"
        "print('fine')",
        on_update=updates,
    )

    assert updates == [f"notify: {n}" for n in range(64)]
    assert result.text == "fine\n"
    assert result.details["rpc_denied"] == 0
    assert result.details["rpc_errors"] == 0


@pytest.mark.case(201)
def test_listener_that_raises(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """A callback that raises harms nothing; that it did is logged once per run, without what it said."""
    (agent.cwd / "f.txt").write_text("content")
    seen = []

    def angry(update: ToolUpdate) -> None:
        seen.append(update.text)
        raise RuntimeError("a secret of the callback")

    with caplog.at_level(logging.DEBUG):
        result = agent.run("notify('a'); notify('b'); print(read('f.txt'))", on_update=angry)

    assert result.text == "1: content\n"
    assert seen == ["notify: a", "notify: b"]
    assert len([record for record in caplog.records if "on_update" in record.getMessage()]) == 1
    assert "a secret of the callback" not in caplog.text


def test_listener_may_be_a_coroutine_function(agent: Agent) -> None:
    """An async callback is awaited, one message at a time (behaviour 2.9)."""
    told: list[str] = []

    async def slowly(update: ToolUpdate) -> None:
        told.append(f"begin {update.text}")
        await asyncio.sleep(0.01)
        told.append(f"end {update.text}")

    agent.run("notify(1); notify(2)", on_update=slowly)

    assert told == ["begin notify: 1", "end notify: 1", "begin notify: 2", "end notify: 2"]


@pytest.mark.case(202)
def test_each_cell_has_its_own_notify_cap(session: Agent) -> None:
    """A cell that used its 64 messages up takes none from the next one."""
    updates = Updates()
    session.run("for n in range(64): notify(n)", on_update=updates)
    session.run("notify('next')", on_update=updates)

    assert updates == [*(f"notify: {n}" for n in range(64)), "notify: next"]


# -- frames past the script's side ----------------------------------------------------------------------------


def test_malformed_text_frames_are_refused(agent: Agent) -> None:
    """A text frame without a number, without text, too large, or no Unicode harms nothing (behaviour 5.7)."""
    result = agent.run(
        "from lemon_tools import _raw\n"
        "bad = [{'text': 'x'}, {'n': '1', 'text': 'x'}, {'n': True, 'text': 'x'}, {'n': 1.0, 'text': 'x'},\n"
        "       {'n': 1}, {'n': 1, 'text': 5}, {'n': 1, 'text': 'a\\ud800b'}, {'n': 1, 'text': 'x' * 500}]\n"
        "for number, frame in enumerate(bad):\n"
        "    answer = _raw({'type': 'text', 'id': 500 + number, 'token': _raw.token, **frame})\n"
        "    print(answer['ok'], end=' ')\n"
        "text('good')",
        config={"max_text_bytes": 200},
    )

    assert result.text == with_blocks("good", "False " * 8)
    assert result.details["rpc_calls"] == 0
    assert result.details["rpc_denied"] == 0


def test_text_frame_with_a_wrong_token_is_denied(agent: Agent) -> None:
    """It gets the one answer of all bad tokens and counts as denied (behaviour 5.7)."""
    result = agent.run(
        "from lemon_tools import _raw\n"
        "for token in ('x' * 43, None, 7):\n"
        "    print(_raw({'type': 'text', 'id': 9, 'token': token, 'n': 1, 'text': 'x'})['content'])"
    )

    assert result.text == "rpc authentication failed\n" * 3
    assert result.details["rpc_denied"] == 3
    assert result.details["rpc_errors"] == 0


def test_request_that_is_too_large_is_not_sent(agent: Agent) -> None:
    """A helper call of more than 256 KiB is refused on the script's side, with its size (behaviour 5.8)."""
    result = agent.run(
        "try:\n    grep('x' * 300000)\nexcept ToolError as error:\n    print(error)\nprint(ls() != '')"
    )

    message, rest = result.text.split("\n", 1)
    assert message.startswith("request is too large (300")
    assert message.endswith(" bytes, cap 262144)")
    assert rest == "True\n"
    assert result.details["rpc_calls"] == 1
    assert result.details["rpc_errors"] == 0


def test_channels_work_only_in_the_process_of_the_script(agent: Agent) -> None:
    """In a forked child the module can be imported, and every call is refused (behaviour 5.7)."""
    result = agent.run(
        "import os, subprocess, sys\n"
        "def attempt():\n"
        "    import lemon_tools\n"
        "    for call in (lemon_tools.text, lemon_tools.read, lemon_tools.notify):\n"
        "        try:\n            call('x')\n"
        "        except lemon_tools.ToolError as error:\n            print(error, flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    attempt()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "text('from the script')"
    )

    refusal = "helpers work only in the process that runs the script\n"
    assert result.text == with_blocks("from the script", refusal * 3)
    assert result.details["rpc_calls"] == 0
