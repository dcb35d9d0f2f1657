"""The bridge over a Jupyter comm to a front-end kernel, with a notebook host made for the test (behaviour 6.13)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from lemon_shim.kernel.bridge import KernelCarrier
from lemon_shim.message import Signer, encode

from lemon_kernel.bridge.comm import CommCarrier
from lemon_kernel.bridge.dispatch import Dispatcher
from lemon_kernel.scope import AbortSignal

from ..kernels import LIMITS, echo, wait_until


class Front:
    """A front end and a notebook host in one: it runs cells, and grants each one authority."""

    def __init__(self, client: Any, *, refuse: str | None = None) -> None:
        self.client = client
        self.refuse = refuse
        self.opened: list[str] = []
        self.dispatcher: Dispatcher | None = None
        self.carrier = CommCarrier(self._send, self._open)
        self.carrier.open()

    def _send(self, kind: str, content: bytes) -> None:
        self.client.control_channel.send(self.client.session.msg(kind, json.loads(content)))

    def _open(self, number: int, request: str) -> None:
        self.opened.append(request)
        if self.refuse is not None:
            self.carrier.refuse(number, self.refuse)
            return
        self.dispatcher = Dispatcher(
            cell=request, limits=LIMITS, helpers=["read"], invoke=echo, cwd="/", abort=AbortSignal()
        )
        self.carrier.attach(self.dispatcher)
        self.carrier.grant(number, self.dispatcher, ["read"])

    async def run(self, code: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run a cell; return its reply's content and the iopub messages that a front end sees."""
        request = self.client.execute(code)
        seen = []
        while True:
            message = await self.client.get_iopub_msg(timeout=30)
            if message["msg_type"] == "comm_msg":
                self.carrier.receive(json.dumps(message["content"]).encode())
                continue
            if message["parent_header"].get("msg_id") == request:
                seen.append(message)
                if message["content"].get("execution_state") == "idle":
                    break
        self.carrier.detach()
        while True:  # wait_for_ready() may have asked twice
            reply = await self.client.get_shell_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == request:
                return reply["content"], seen


def test_late_and_forged_answers_reach_nobody() -> None:
    """Ids count from 1 in each cell: an answer for another cell, or one signed with another key, resolves nothing."""
    sent: list[list[bytes]] = []
    carrier = KernelCarrier(Signer(b"key", "kernel"), sent.append, lambda: b"{}")
    carrier.comm_opened("comm")

    def answer(cell: str, content: str, key: bytes = b"key") -> bool:
        data = {"type": "answer", "cell": cell, "id": 1, "ok": True, "content": content}
        message = encode({"comm_id": "comm", "data": data})
        return carrier.take([b"host", *Signer(key, "host").frames("comm_msg", message)])

    carrier.begin_cell("now", "token", 100, ["read"], b"{}")
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(carrier.exchange, 1, b"{}", 20)
            wait_until(lambda: bool(sent))
            assert answer("earlier", "late")
            assert not answer("now", "forged", b"other")
            assert not waiting.done()
            assert answer("now", "right")
            assert waiting.result(20) == (True, "right")
            assert answer("now", "twice")
    finally:
        carrier.end_cell()
    assert not carrier.take([b"host", *Signer(b"key", "host").frames("kernel_info_request", b"{}")])


def with_front(work: Callable[[Front], Awaitable[None]], *, refuse: str | None = None) -> None:
    async def main() -> None:
        manager = AsyncKernelManager(kernel_name="lemon")
        manager.config.LemonProvisioner.notebook_host = ""
        await manager.start_kernel()
        client = manager.client()
        try:
            client.start_channels()
            await client.wait_for_ready(timeout=30)
            await work(Front(client, refuse=refuse))
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)

    asyncio.run(main())


def printed(seen: list[dict[str, Any]]) -> str:
    return "".join(message["content"]["text"] for message in seen if message["msg_type"] == "stream")


def test_notebook_cells_call_helpers() -> None:
    """Each cell that calls a helper asks once for a grant of its own and gets answers; others ask for nothing."""

    async def work(front: Front) -> None:
        reply, seen = await front.run("print(read('one'), read('two'))")
        assert reply["status"] == "ok", reply
        assert printed(seen) == "one two\n"
        await front.run("1 + 1")
        _, seen = await front.run("print(batch([('read', {'path': str(i)}) for i in range(20)])[19])")
        assert printed(seen) == "19\n"
        assert len(set(front.opened)) == len(front.opened) == 2

    with_front(work)


def test_bridge_is_unseen_and_text_is_shown() -> None:
    """A front end sees busy, input, the shown blocks and idle: no trace of the bridge (5.7, design 7)."""

    async def work(front: Front) -> None:
        _, seen = await front.run("read('x'); text('a block'); notify('half'); notify('done')")
        kinds = [message["msg_type"] for message in seen]
        assert kinds == [
            "status", "execute_input", "display_data", "display_data", "update_display_data", "status",
        ]  # fmt: skip
        assert seen[2]["content"]["data"] == {
            "text/plain": "a block",
            "application/vnd.lemon.text+json": {"n": 1, "text": "a block"},
        }
        assert seen[4]["content"]["data"] == {"text/plain": "notify: done"}
        assert front.dispatcher is not None
        assert front.dispatcher.text_blocks == ["a block"]

    with_front(work)


def test_pool_threads_of_to_thread_count_as_the_running_cell() -> None:
    """``asyncio.to_thread`` works in a later cell on a pool thread born in an earlier one; a global pool does not."""

    async def work(front: Front) -> None:
        await front.run("import asyncio\nfrom concurrent.futures import ThreadPoolExecutor")
        _, seen = await front.run("print(await asyncio.to_thread(read, 'first'))")
        assert printed(seen) == "first\n"
        _, seen = await front.run("pool = ThreadPoolExecutor(1)\nprint(pool.submit(read, 'own').result())")
        assert printed(seen) == "own\n"
        reply, seen = await front.run("print(await asyncio.to_thread(read, 'second'))")
        assert printed(seen) == "second\n", reply
        reply, _ = await front.run("pool.submit(read, 'x').result()")
        assert "belongs to a finished cell" in reply["evalue"]

    with_front(work)


def test_refusal_names_its_reason() -> None:
    """What the host answers to ``open`` instead of a grant is the script's ToolError."""

    async def work(front: Front) -> None:
        reply, _ = await front.run("read('x')")
        assert (reply["ename"], reply["evalue"]) == ("ToolError", "disabled by test")

    with_front(work, refuse="disabled by test")
