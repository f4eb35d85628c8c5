"""Two hosts, as far as one machine can be two: each engine in a network namespace of its own, a virtual cable between.

Unix sockets do not reach across, so nothing of this host's memory is shared or attached: what is left is TCP.
"""

import ctypes
import os
import shutil
import subprocess
import time
import uuid

import pytest
import torch

from cam import NotReachable, kv
from cam import transport as transports
from tests.core.kv.meeting import Meeting
from tests.core.kv.oracle import Shape
from tests.launcher import RankEnv, Ranks, reached

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_NETWORK = "10.77.0"
_SHAPE = Shape("pbthd", blocks=32, tokens=16, total_heads=4, channels=64, dtype=torch.bfloat16)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "there is no iproute2 or no nsenter"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else f"network namespaces are not allowed here: {probe.stderr.strip()}"


_REASON = _why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def _move_out() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    done = [
        libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),  # UCX looks for network devices there
    ]
    if any(done):
        raise OSError(ctypes.get_errno(), f"a network of its own: {done}")


def _host(env: RankEnv, name: str, transport: str, cable: str) -> None:
    """Moves this thread, and those that it starts, into a new network; then rank 1 reads from rank 0."""
    _move_out()
    os.environ["UCX_TLS"] = "tcp"  # UCX would otherwise attach to the other process after all
    meeting = Meeting(env, name)
    reached("own network")
    with open(f"{cable}{env.rank}") as pipe:
        pipe.read()  # until the test has plugged it in
    address = f"{_NETWORK}.{env.rank + 1}"
    options = kv.Options(transports=("shm", "cma", transport), timeout_s=60)
    with kv.Engine(f"host{env.rank}", listen=address, options=options) as engine:
        layers = [engine.empty(_SHAPE.sizes(), _SHAPE.dtype) for _ in range(3)]
        for index, layer in enumerate(layers):
            layer.copy_(torch.arange(layer.numel()).add(index).remainder(251).view(layer.shape) * (1 - env.rank))
        engine.register([_SHAPE.layer(f"layer.{index}", layer) for index, layer in enumerate(layers)])
        if env.rank == 0:
            engine.lease("loan")
            meeting.put("description", engine.describe())
            meeting.get("done")
            kinds = [type(event) for event in engine.poll() if not isinstance(event, kv.PeerGone)]
            assert kinds == [kv.Notification, kv.LeaseEnded], kinds
            assert bool((layers[0][:, 7] == 0).all())  # written from the other side
            meeting.put("looked")
            return
        description = meeting.get("description")
        for local in ("shm", "cma"):
            with pytest.raises(NotReachable, match="host"):
                engine.open(description, transport=local)
        remote = engine.open(description)
        assert remote.transport == transport
        assert "no Unix socket" in remote.reason
        blocks = [3, 9, 1, 30]
        prepared = engine.prepare("read", remote, blocks, [0, 5, 2, 8])
        assert prepared.checksum  # by itself, across hosts
        prepared.post(lease="loan", notify=b"read").wait()
        for index, layer in enumerate(layers):
            whole = torch.arange(layer.numel()).add(index).remainder(251).view(layer.shape).to(layer.dtype)
            assert torch.equal(layer[:, [0, 5, 2, 8]], whole[:, blocks])
        engine.write(remote, [7], [20]).wait()
        flows = {flow["direction"]: flow for flow in engine.metrics()["flows"]}
        assert flows["read"]["blocks"] == 4
        meeting.put("done")
        meeting.get("looked")


def _ip(pid: int, *arguments: str) -> str:
    command = ["nsenter", "-t", str(pid), "-n", "ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, timeout=20, text=True).stdout


def _wait_for_carrier(pid: int) -> None:
    """The kernel reports that a cable is plugged in up to a second later."""
    until = time.monotonic() + 10
    while "state UP" not in _ip(pid, "link", "show", "cam0"):
        assert time.monotonic() < until, "the cable has no carrier"
        time.sleep(0.02)


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_engines_of_two_hosts_use_the_network(transport, tmp_path):
    reason = transports.available()[transport]
    if reason:
        pytest.skip(reason)
    cable = str(tmp_path / "cable")
    for rank in range(2):
        os.mkfifo(f"{cable}{rank}")
    with Ranks(2, group=False) as ranks:
        run = ranks.start(_host, str(uuid.uuid4()), transport, cable, deadline=150)
        for rank in range(2):
            run.wait_reached(rank, "own network")
        # Its two ends vanish with the processes whose networks they are in.
        first, second = ranks.pids
        link = ["ip", "link", "add", "cam0", "netns", str(first), "type", "veth", "peer", "name", "cam0"]
        subprocess.run([*link, "netns", str(second)], check=True, capture_output=True, timeout=20)
        for rank, pid in enumerate((first, second)):
            _ip(pid, "addr", "add", f"{_NETWORK}.{rank + 1}/24", "dev", "cam0")
            _ip(pid, "link", "set", "cam0", "up")
            _ip(pid, "link", "set", "lo", "up")
        for pid in (first, second):
            _wait_for_carrier(pid)
        ranks.kill(0, 0)  # no signal: these processes stay in their networks, so no later test may get them
        for rank in range(2):
            with open(f"{cable}{rank}", "w"):
                pass
        run.join()
