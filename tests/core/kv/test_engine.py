"""The engine, several in one process: opening, refusals, leases, words, checksums, metrics, forks."""

import contextlib
import gc
import os
import select
import socket
import struct
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cam import (
    BackendUnavailable,
    ConfigError,
    ForkedProcess,
    InputError,
    Mismatch,
    NotReachable,
    PeerLost,
    Timeout,
    TransferFailed,
    kv,
)
from cam import transport as transports
from cam.kv import messages
from tests.core.kv.oracle import Shape, content, fill

SHAPE = Shape("bpthd", blocks=8, tokens=16, total_heads=2, channels=8)


def _a_description() -> bytes:
    with kv.Engine("described") as engine:
        engine.register([SHAPE.layer(f"layer.{i}", torch.zeros(SHAPE.sizes())) for i in range(2)])
        return engine.describe()


_DESCRIPTION = _a_description()


@pytest.fixture(name="engines")
def _engines():
    with contextlib.ExitStack() as stack:

        def make(name: str, shape: Shape = SHAPE, *, layers: int = 2, shared: bool = True, **arguments):
            options = kv.Options(**{"timeout_s": 60.0, **arguments.pop("options", {})})
            engine = kv.Engine(name, tp_rank=shape.tp_rank, tp_size=shape.tp_size, options=options, **arguments)
            stack.callback(engine.close)
            allocate = engine.empty if shared else torch.empty
            tensors = [allocate(shape.sizes(), dtype=shape.dtype) for _ in range(layers)]
            for index, tensor in enumerate(tensors):
                tensor.copy_(torch.randn(shape.sizes(), generator=torch.Generator().manual_seed(index)))
            engine.register([shape.layer(f"layer.{index}", tensor) for index, tensor in enumerate(tensors)])
            return engine, tensors

        yield make


def _until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


def _events(engine: kv.Engine, count: int, seconds: float = 60.0) -> list[kv.Event]:
    """Waits on the descriptor, as an owner with an event loop does."""
    found: list[kv.Event] = []
    end = time.monotonic() + seconds
    while len(found) < count:
        left = end - time.monotonic()
        assert left > 0, f"only {found}"
        select.select([engine.fileno()], [], [], left)
        found += engine.poll()
    return found


# --- opening ------------------------------------------------------------------------------------------------------


def test_auto_takes_shared_memory_and_says_why(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader", shared=False)
    remote = reader.open(owner.describe())
    assert remote.transport == "shm"
    assert "mapped 1 segment" in remote.reason
    assert remote.transports == {owner.engine_id: "shm"}
    assert remote.alive


def test_auto_falls_back_to_cma_for_private_memory_and_says_why(engines):
    owner, _ = engines("owner", shared=False)
    reader, _ = engines("reader", shared=False)
    remote = reader.open(owner.describe())
    assert remote.transport == "cma"
    assert "not in CAM memory" in remote.reason
    with pytest.raises(NotReachable, match="not in CAM memory"):
        reader.open(owner.describe(), transport="shm")


def test_adopted_tensors_keep_contents_and_views(engines):
    engine = kv.Engine("adopter")
    storage = torch.randn(2, *SHAPE.sizes())
    layers = [storage[0], storage[1]]
    before = [each.clone() for each in layers]
    with engine:
        assert not engine.holds(layers[0])
        assert engine.adopt(layers) == storage.nbytes
        assert all(engine.holds(each) for each in layers)
        assert engine.adopt(layers) == 0
        assert all(torch.equal(a, b) for a, b in zip(layers, before, strict=True))
        assert layers[0].untyped_storage().data_ptr() == layers[1].untyped_storage().data_ptr()
        engine.register([SHAPE.layer(f"layer.{i}", each) for i, each in enumerate(layers)])
        with pytest.raises(InputError, match="before register"):
            engine.adopt(layers)
        reader, target = engines("reader", shared=False)
        remote = reader.open(engine.describe())
        assert remote.transport == "shm"
        reader.read(remote, [1], [2]).wait()
        assert torch.equal(target[1][2], before[1][1])


def test_adopting_without_the_contents_copies_nothing():
    with kv.Engine("adopter") as engine:
        tensor = torch.full((64, 1024), 3.0)
        assert engine.adopt([tensor], keep=False) == tensor.nbytes
        assert engine.holds(tensor)
        assert not bool((tensor == 3.0).any())  # fresh pages: zeros, though nobody may rely on it


def test_an_unknown_transport_lists_those_that_exist(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    with pytest.raises(BackendUnavailable, match=r"no transport 'shmem'.*shm") as caught:
        reader.open(owner.describe(), transport="shmem")
    assert "cma" in str(caught.value)
    with pytest.raises(BackendUnavailable, match="shmem"):
        kv.Engine("x", options=kv.Options(transports=("shmem",)))


def test_a_transport_that_cannot_be_loaded_says_why():
    transports.register("ghost", "cam_no_such_module", "Ghost", "cam-ghost")
    assert "pip install cam-ghost" in transports.available()["ghost"]
    with kv.Engine("a", options=kv.Options(transports=("ghost",))) as a, kv.Engine("b") as b:
        for engine in (a, b):
            tensor = torch.zeros(SHAPE.sizes())
            engine.register([SHAPE.layer("l", tensor)])
        with pytest.raises(NotReachable, match=r"ghost.*cannot be loaded.*pip install cam-ghost"):
            a.open(b.describe())


@pytest.mark.parametrize(
    ("theirs", "field", "values"),
    [
        (Shape("bpthd", 8, 16, 2, channels=8, dtype=torch.bfloat16), "dtype", ("float32", "bfloat16")),
        (Shape("bpthd", 8, 16, 2, channels=4), "bytes of a head", ("32", "16")),
        (Shape("bthpd", 8, 16, 4, channels=8), "total_heads", ("2", "4")),
        (Shape("btd", 8, 16, 1, channels=8), "planes", ("2", "1")),
    ],
)
def test_geometries_that_cannot_meet_are_refused_with_both_values(engines, theirs, field, values):
    owner, _ = engines("owner", theirs)
    reader, _ = engines("reader")
    with pytest.raises(Mismatch) as caught:
        reader.open(owner.describe())
    error = caught.value
    assert (error.field, error.mine, error.theirs) == (field, *values)
    assert all(value in str(error) for value in values)
    assert "layer.0" in str(error)


def test_layers_and_heads_that_nobody_has_are_refused(engines):
    owner, _ = engines("owner", layers=2)
    more, _ = engines("more", layers=3)
    with pytest.raises(Mismatch, match=r"layer.2"):
        more.open(owner.describe())
    half, _ = engines("half", Shape("bpthd", 8, 16, 2, 0, 2, channels=8))
    with pytest.raises(Mismatch, match="no remote rank holds KV head 1"):
        owner.open(half.describe())


def test_pipeline_stages_are_found_by_their_layers(engines):
    whole, target = engines("whole", layers=2)
    stages = []
    for index in range(2):
        stage = kv.Engine(f"stage{index}")
        tensor = stage.empty(SHAPE.sizes(), torch.float32)
        tensor.fill_(index + 1)
        stage.register([SHAPE.layer(f"layer.{index}", tensor)])
        stages.append(stage)
    with stages[0], stages[1]:
        remote = whole.open(*(stage.describe() for stage in stages))
        whole.read(remote, [0], [3]).wait()
        assert [float(tensor[3].mean()) for tensor in target] == [1.0, 2.0]


@pytest.mark.parametrize("damage", [b"", b"x", b"\xc1" * 40, b"\x9a" + b"\x01" * 10])
def test_descriptions_that_are_none_are_refused(engines, damage):
    reader, _ = engines("reader")
    with pytest.raises(InputError, match="description"):
        reader.open(damage)


def test_a_description_of_another_version_names_both(engines):
    owner, _ = engines("owner")
    data = bytearray(owner.describe())
    assert data[1] == messages.VERSION
    data[1] = 99
    with pytest.raises(InputError, match=r"version 99.*understands 1"):
        owner.open(bytes(data))


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 20))
def test_damaged_descriptions_are_refused_or_harmless(place, value, cut):
    """Whatever one byte says: an error of ours, never a crash, never a wait."""
    data = bytearray(_DESCRIPTION)
    data[place % len(data)] = value
    with contextlib.suppress(ValueError):
        known = messages.read_description(bytes(data[: len(data) - cut]))
        assert len(known.layers) <= 4096


@pytest.mark.parametrize(("owners", "readers"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 2), (4, 4)])
def test_whole_instances_read_and_write_replicated_heads(engines, owners, readers):
    """Field bugs sglang#31295, #31968: 2 KV heads on 1, 2 or 4 ranks of either side."""

    def instance(name, size):
        return [engines(f"{name}{rank}", Shape("bpthd", 6, 16, 2, rank, size, channels=8)) for rank in range(size)]

    theirs, mine = instance("owner", owners), instance("reader", readers)
    truth = torch.arange(32 * 2 * 2 * 8).float().view(32, 2, 2, 8)
    for rank, (_, tensors) in enumerate(theirs):
        for tensor in tensors:
            fill(Shape("bpthd", 6, 16, 2, rank, owners, channels=8), tensor, [5, 0], truth)
    remotes = [engine.open(*(owner.describe() for owner, _ in theirs)) for engine, _ in mine]
    for rank, ((engine, tensors), remote) in enumerate(zip(mine, remotes, strict=True)):
        engine.read(remote, [5, 0], [1, 2]).wait()
        shape = Shape("bpthd", 6, 16, 2, rank, readers, channels=8)
        heads = slice(shape.heads.first, shape.heads.end)
        for tensor in tensors:
            assert torch.equal(content(shape, tensor, [1, 2], range(32)), truth[:, :, heads])
            fill(shape, tensor, [1, 2], -truth)
    for (engine, _), remote in zip(mine, remotes, strict=True):
        engine.write(remote, [5, 0], [1, 2]).wait()
    for rank, (_, tensors) in enumerate(theirs):
        shape = Shape("bpthd", 6, 16, 2, rank, owners, channels=8)
        heads = slice(shape.heads.first, shape.heads.end)
        for tensor in tensors:
            assert torch.equal(content(shape, tensor, [5, 0], range(32)), -truth[:, :, heads])


def test_a_closed_engine_is_not_reachable_and_a_restarted_one_is_told_apart(engines):
    owner, _ = engines("owner")
    description, (_, port) = owner.describe(), owner.address
    reader, _ = engines("reader")
    owner.close()
    with pytest.raises(NotReachable, match=owner.engine_id):
        reader.open(description)
    restarted = kv.Engine("owner", port=port)
    with restarted:
        restarted.register([SHAPE.layer("layer.0", torch.zeros(SHAPE.sizes()))])
        with pytest.raises(NotReachable) as caught:
            reader.open(description)
        assert owner.engine_id in str(caught.value)
        assert restarted.engine_id in str(caught.value)


def test_ports_are_the_systems_and_differ(engines):
    ports = {engines(f"e{i}")[0].address[1] for i in range(8)}
    assert len(ports) == 8
    assert 0 not in ports
    taken = next(iter(ports))
    with pytest.raises(InputError, match=rf"port {taken}.*port 0"):
        kv.Engine("late", port=taken)


def test_a_shared_secret_stays_out_of_the_description(engines):
    owner, _ = engines("owner", secret="open sesame")
    reader, _ = engines("reader", secret="open sesame")
    stranger, _ = engines("stranger", secret="other")
    assert b"open sesame" not in owner.describe()
    assert reader.open(reader.fetch(*owner.address)).name == "owner"
    for call in (lambda: stranger.open(owner.describe()), lambda: stranger.fetch(*owner.address)):
        with pytest.raises(NotReachable, match="secret"):
            call()


# --- strangers ----------------------------------------------------------------------------------------------------


def test_strangers_hold_nobody_up(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    callers = []
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 30), struct.pack("<I", 4) + b"\xff" * 4):
        caller = socket.create_connection(owner.address)
        caller.settimeout(5)
        caller.sendall(words)
        callers.append(caller)
    remote = reader.open(owner.describe())
    reader.read(remote, [0], [1], notify=b"fine").wait()
    assert isinstance(_events(owner, 1)[0], kv.Notification)
    for caller in callers[1:]:
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(100) == b""  # cut off
    for caller in callers:
        caller.close()


def test_whoever_has_not_proven_the_secret_gets_no_answer(engines):
    owner, _ = engines("owner")
    with socket.create_connection(owner.address) as caller:
        caller.settimeout(5)
        question = messages.encode(messages.AskDescription())
        caller.sendall(struct.pack("<I", len(question)) + question)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(100) == b""


# --- transfers ----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_must_exist(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    for blocks, says in (
        (([8], [0]), "remote block ids must be in 0..7"),
        (([0], [9]), "block ids must be in 0..7"),
        (([0, 1], [0]), "tokens="),
        (([0.5], [0]), "list of block ids"),
        (([[0]], [0]), "list of block ids"),
    ):
        with pytest.raises(InputError, match=says):
            reader.read(remote, *blocks)
    with pytest.raises(InputError, match=r"no layer 'layer.9'"):
        reader.read(remote, [0], [0], layers=["layer.9"])
    with pytest.raises(InputError, match="need tokens"):
        reader.read(remote, [0], [0], local_start=3)
    with pytest.raises(InputError, match="timeout"):
        reader.read(remote, [0], [0], timeout=0)
    with pytest.raises(InputError, match="direction"):
        reader.prepare("fetch", remote, [0], [0])


@pytest.mark.parametrize("ids", [[1, 2], torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)])
def test_block_ids_come_as_lists_or_tensors(engines, ids):
    owner, source = engines("owner")
    reader, target = engines("reader")
    reader.read(reader.open(owner.describe()), ids, ids).wait()
    assert torch.equal(target[1][1:3], source[1][1:3])


def test_a_prefix_hit_pulls_the_missing_tail_only(engines):
    """Field bug vllm#25267: 40 of 72 tokens are here already, the rest comes from the middle of a block."""
    owner, source = engines("owner")
    reader, target = engines("reader")
    for tensor in target:
        tensor.zero_()
    remote = reader.open(owner.describe())
    transfer = reader.read(remote, [7, 6, 5, 4, 3], [0, 1, 2, 3, 4], tokens=32, remote_start=40, local_start=40)
    transfer.wait()
    assert transfer.nbytes == 2 * 32 * 2 * 2 * 8 * 4
    assert not bool(target[0][:2].any())
    assert not bool(target[0][2, :, :8].any())
    assert torch.equal(target[0][2, :, 8:], source[0][5, :, 8:])
    assert torch.equal(target[0][3], source[0][4])
    assert torch.equal(target[0][4, :, :8], source[0][3, :, :8])
    assert not bool(target[0][4, :, 8:].any())


def test_remote_block_size_counts_remote_blocks(engines):
    """Field bug vllm#42097: prefill with blocks of 16, decode with 64, 77 tokens."""
    owner, source = engines("owner", Shape("bpthd", 8, 16, 2, channels=8))
    reader, target = engines("reader", Shape("bpthd", 4, 64, 2, channels=8))
    remote = reader.open(owner.describe())
    assert remote.block_size == 16
    reader.read(remote, [7, 0, 3, 1, 5], [2, 1], tokens=77).wait()
    assert torch.equal(target[1][2, :, 16:32], source[1][0])
    assert torch.equal(target[1][1, :, :13], source[1][5, :, :13])


def test_callbacks_and_repeated_waits(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    seen = []
    transfer = reader.read(remote, [0], [0], notify=b"x")
    transfer.add_done_callback(seen.append)
    transfer.wait()
    transfer.wait(1)
    _until(lambda: seen == [transfer])
    transfer.add_done_callback(seen.append)
    assert seen == [transfer, transfer]
    transfer.cancel()
    assert transfer.done()
    assert transfer.error is None


def test_closing_ends_what_is_under_way_and_is_idempotent(engines):
    """Field bug nixl#2067."""
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    prepared = reader.prepare("read", remote, [0], [0])
    transfers = [prepared.post(notify=b"x") for _ in range(50)]
    reader.close()
    reader.close()
    remote.close()
    assert all(transfer.done() for transfer in transfers)
    with pytest.raises(PeerLost, match="closed here"):
        prepared.post()
    with pytest.raises(NotReachable, match="was closed"):
        reader.read(remote, [0], [0])


def test_checksums_find_damaged_blocks(engines):
    transports.register("corrupting", "tests.core.kv.corrupting", "Corrupting")
    options = {"transports": ("corrupting",)}
    owner, source = engines("owner", options=options, shared=False)
    reader, target = engines("reader", options=options, shared=False)
    remote = reader.open(owner.describe())
    assert remote.transport == "corrupting"
    # Not a transport of this host by name, so checksums are on by themselves.
    transfer = reader.read(remote, [3, 4, 5], [6, 7, 1], notify=b"never said")
    with pytest.raises(TransferFailed, match="checksums of 1 block"):
        transfer.wait()
    assert transfer.failed_blocks == (6,)
    assert torch.equal(target[0][7], source[0][4])
    assert reader.metrics()["flows"][0]["corrupt_blocks"] == 1
    with pytest.raises(TransferFailed):
        reader.write(remote, [0], [2]).wait()
    reader.read(remote, [3], [6], checksum=False).wait()
    reader.close()  # then everything that was said has been heard
    assert not any(isinstance(event, kv.Notification) for event in owner.poll())


def test_checksums_agree_over_any_geometry(engines):
    owners = [engines(f"owner{rank}", Shape("bpthd", 9, 16, 4, rank, 2, channels=8))[0] for rank in range(2)]
    reader, _ = engines("reader", Shape("pbhtd", 5, 32, 4, channels=8))
    remote = reader.open(*(owner.describe() for owner in owners))
    reader.read(remote, [8, 1, 7], [3, 0], tokens=45, remote_start=2, local_start=5, checksum=True).wait()
    reader.write(remote, [8, 1, 7], [3, 0], tokens=45, remote_start=2, local_start=5, checksum=True).wait()


# --- leases -------------------------------------------------------------------------------------------------------


def test_a_lease_ends_when_all_readers_have_released_it(engines):
    owner, _ = engines("owner")
    readers = [engines(f"reader{i}")[0] for i in range(2)]
    remotes = [reader.open(owner.describe()) for reader in readers]
    lease = owner.lease("request-1", tag=b"blocks 1 2 3", readers=2)
    assert owner.metrics()["leases"]["active"] == 1
    readers[0].read(remotes[0], [1], [1], lease=lease).wait()
    readers[0].read(remotes[0], [1], [1], lease=lease).wait()  # the same reader again does not count twice
    assert owner.poll() == []
    readers[1].read(remotes[1], [1], [1], lease=lease).wait()
    assert _events(owner, 1) == [kv.LeaseEnded("request-1", b"blocks 1 2 3", "released", 0)]
    with pytest.raises(TransferFailed, match="is over: released") as caught:
        readers[1].read(remotes[1], [1], [1], lease=lease).wait()
    assert caught.value.failed_blocks == (1,)
    with pytest.raises(InputError, match="used once"):
        owner.lease("request-1")


def test_an_abandoned_lease_expires(engines):
    """Field bugs vllm#46283, vllm-ascend#16662: decode never comes."""
    owner, _ = engines("owner")
    began = time.monotonic()
    owner.lease("forgotten", ttl_s=0.3, tag=b"t")
    (event,) = _events(owner, 1)
    assert event == kv.LeaseEnded("forgotten", b"t", "expired", 1)
    assert time.monotonic() - began >= 0.3
    assert owner.metrics()["leases"]["active"] == 0


def test_a_reader_may_be_quicker_than_the_lease(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    reader.read(remote, [1], [1], lease="early", notify=b"got it").wait()
    owner.lease("early")
    assert [type(event) for event in _events(owner, 2)] == [kv.Notification, kv.LeaseEnded]


def test_a_lease_that_ends_during_the_read_fails_the_blocks(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    lease = owner.lease()
    prepared = reader.prepare("read", remote, [1, 2], [3, 4])
    stretch, ready = prepared._entries(None)[0]

    class EndsTheLease:
        def run(self, limits):
            outcome = ready.run(limits)
            assert owner.end_lease(lease)
            return outcome

        def close(self):
            ready.close()

    prepared._ready[None] = [(stretch, EndsTheLease())]
    transfer = prepared.post(lease=lease, notify=b"no")
    with pytest.raises(TransferFailed, match="is over: ended"):
        transfer.wait()
    assert transfer.failed_blocks == (3, 4)
    assert not owner.end_lease(lease)


def test_a_failed_or_cancelled_transfer_gives_the_lease_back(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    lease = owner.lease(tag=b"t")
    transfer = reader.read(remote, [1], [1], lease=lease, notify=b"no", timeout=1e-9)
    with pytest.raises(TransferFailed):
        transfer.wait()
    assert remote.alive
    assert [event.reason for event in _events(owner, 1) if isinstance(event, kv.LeaseEnded)] == ["released"]


def test_many_completions_in_any_order(engines):
    """Field bug vllm#56089: every lease ends exactly once, whatever the order."""
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    leases = [owner.lease(f"r{i}", tag=str(i).encode()) for i in range(20)]
    transfers = [reader.read(remote, [1], [1], lease=lease) for lease in reversed(leases)]
    owner.end_lease("r7")
    for transfer in transfers:
        with contextlib.suppress(TransferFailed):
            transfer.wait()
    ended = [event.lease for event in _events(owner, 20)]
    assert sorted(ended) == sorted(leases)
    assert owner.poll() == []


# --- words, metrics, the rest -------------------------------------------------------------------------------------


def test_words_go_to_every_rank_and_carry_their_sender(engines):
    owners = [engines(f"owner{rank}", Shape("bpthd", 8, 16, 1, rank, 2, channels=8))[0] for rank in range(2)]
    reader, _ = engines("reader", Shape("bpthd", 8, 16, 1, channels=8))
    remote = reader.open(*(owner.describe() for owner in owners))
    reader.read(remote, [0], [0], notify=b"replicated heads: read from one of you").wait()
    remote.notify(b"by itself")
    for owner in owners:
        first, second = _events(owner, 2)
        assert first.payload.startswith(b"replicated")
        assert second == kv.Notification(b"by itself", reader.engine_id, "reader", 0, 1)
    with pytest.raises(InputError, match="notify"):
        reader.read(remote, [0], [0], notify="text")


def test_a_peer_that_leaves_is_reported_once(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remotes = [reader.open(owner.describe()) for _ in range(2)]
    remotes[0].close()
    reader.close()
    assert _events(owner, 1) == [kv.PeerGone(reader.engine_id, "reader", "closed")]


def test_metrics_as_values_and_as_text(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    for _ in range(3):
        reader.read(remote, [0, 1], [2, 3]).wait()
    reader.write(remote, [0], [0], notify=b"x").wait()
    flows = {(flow["transport"], flow["direction"]): flow for flow in reader.metrics()["flows"]}
    read = flows["shm", "read"]
    assert (read["transfers"], read["blocks"], read["failures"]) == (3, 6, 0)
    assert read["nbytes"] == 3 * 2 * 2 * SHAPE.layer("l", torch.empty(SHAPE.sizes())).geometry(0, 1).block_bytes
    assert read["seconds"] > 0
    text = reader.prometheus()
    assert 'cam_kv_blocks_total{direction="read",engine="reader",peer="owner",transport="shm"} 6.0' in text
    assert 'cam_kv_handshakes_total{engine="reader",peer="owner"} 1.0' in text
    assert 'cam_kv_notifications_total{engine="owner",way="received"} 1.0' in owner.prometheus()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"time_s": 1}, "did you mean 'timeout_s'"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"transports": "shm"}, "list of names"),
        ({"threads": 0}, "threads"),
        ({"checksum": "yes"}, "checksum"),
    ],
)
def test_options_are_checked(given, says):
    with pytest.raises(ConfigError, match=says):
        kv.Options.parse(given)


def test_a_stopped_peer_is_a_timeout_not_a_hang(engines):
    owner, _ = engines("owner")
    reader, _ = engines("reader")
    remote = reader.open(owner.describe())
    blocker = threading.Event()
    owner._agent._calls.put(lambda: blocker.wait(120))  # the agent's thread is busy with something else
    owner._agent.wake()
    try:
        began = time.monotonic()
        with pytest.raises(TransferFailed, match="did not answer") as caught:
            reader.read(remote, [0], [0], notify=b"x", timeout=0.5).wait()
        assert time.monotonic() - began < 60
        assert isinstance(caught.value.cause, Timeout)
        assert remote.alive
    finally:
        blocker.set()
    # What comes late is not taken for the answer to the next question.
    for _ in range(3):
        reader.read(remote, [0], [0], notify=b"y", lease="l").wait()
        assert reader.prepare("read", remote, [0], [0], checksum=True).post().wait() is None


def test_a_forked_child_is_told(engines):
    owner, _ = engines("owner")
    reader, target = engines("reader")
    remote = reader.open(owner.describe())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            reader.open(owner.describe())
        except ForkedProcess:
            del engines, owner, reader, remote  # threads that copied for them are not here to be waited for
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reader.read(remote, [0], [1], notify=b"the parent goes on").wait()
    assert target[0].numel()


def test_nothing_is_left_open():
    def descriptors() -> int:
        gc.collect()  # the memory of engines that are gone
        return len(os.listdir("/proc/self/fd"))

    threads = threading.active_count()
    before = None
    for _ in range(3):
        with kv.Engine("a") as a, kv.Engine("b") as b:
            for engine in (a, b):
                engine.register([SHAPE.layer("l", engine.empty(SHAPE.sizes(), torch.float32))])
            remote = a.open(b.describe())
            a.read(remote, [0], [0], notify=b"x").wait()
        del a, b, engine, remote
        before = descriptors() if before is None else before
    assert descriptors() == before
    assert threading.active_count() == threads
