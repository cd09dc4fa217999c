"""How samples and batches travel: every tensor arrives as it was, and nothing is held in shared memory."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pytest
import torch

from odb_factory.core.sample import Dropped
from odb_factory.runtime.messages import EpochEnd, Phase, StepInfo
from odb_factory.runtime.serialise import LARGE, dumps, loads, serialise
from odb_factory.runtime.transport.connection import receive, send
from tests.runtime.helpers import open_files, shared_memory_files

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
]
SHAPES = [(), (1,), (7,), (0,), (3, 0, 2), (2, 3, 4)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def in_band(obj: Any) -> Any:
    return loads(dumps(obj))


def out_of_band(obj: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(obj, buffers.append)
    return loads(head, [bytearray(b.raw()) for b in buffers])


def over_socket(obj: Any) -> Any:
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=send, args=(left, obj))
        sender.start()
        result = receive(right)
        sender.join(10)
        assert not sender.is_alive()
    return result


WAYS = [in_band, out_of_band, over_socket]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_as_it_was(way: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [(torch.randn(shape) * 5).abs().to(dtype) for shape in SHAPES]
    for sent, got in zip(tensors, way(tensors), strict=True):
        assert same(sent, got)
        assert got.dtype == dtype


@pytest.mark.parametrize("way", WAYS)
def test_non_contiguous_tensors_keep_their_values(way: Any) -> None:
    base = torch.arange(24).reshape(4, 6)
    views = [base.t(), base[:, ::2], base[1:, 3:], base[:1].expand(5, 6), base.flip(0)]
    for sent, got in zip(views, way(views), strict=True):
        assert torch.equal(sent, got)
        assert got.is_contiguous()


@pytest.mark.parametrize("way", WAYS)
def test_a_small_view_does_not_take_its_storage_along(way: Any) -> None:
    huge = torch.zeros(1_000_000)
    assert len(dumps(huge[:3])) < 1_000
    assert way(huge[:3]).untyped_storage().nbytes() == 12


@pytest.mark.parametrize("way", WAYS)
def test_received_tensors_can_be_written_to_and_are_not_shared(way: Any) -> None:
    sent = {"a": torch.zeros(4), "b": torch.zeros(4)}
    got = way(sent)
    got["a"].add_(1)
    assert torch.equal(got["a"], torch.ones(4))
    assert torch.equal(got["b"], torch.zeros(4))
    assert torch.equal(sent["a"], torch.zeros(4))


@pytest.mark.parametrize("way", WAYS)
def test_nested_structures_keep_types_and_identity(way: Any) -> None:
    shared = torch.arange(3)
    obj = {
        "list": [shared, (torch.tensor(1.5), None)],
        "ordered": OrderedDict(x=shared),
        "user": UserDict(y=torch.tensor([True, False])),
        "numpy": np.arange(5, dtype=np.int16),
        "text": "ä",
        3: Dropped(7, "why", "detail"),
    }
    got = way(obj)
    assert list(got) == list(obj)
    assert type(got["ordered"]) is OrderedDict
    assert type(got["user"]) is UserDict
    assert got["user"]["y"].tolist() == [True, False]
    assert got["list"][0] is got["ordered"]["x"], "one tensor twice stays one tensor"
    assert got["list"][1][0].shape == ()
    assert got["list"][1][1] is None
    assert got["numpy"].dtype == np.int16
    assert got["numpy"].tolist() == [0, 1, 2, 3, 4]
    assert got["text"] == "ä"
    assert got[3] == Dropped(7, "why", "detail")


@pytest.mark.parametrize("way", WAYS)
def test_unusual_tensors_fall_back_to_torchs_own_pickling(way: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    sparse = torch.eye(3).to_sparse()
    got_parameter, got_sparse, got_grad = way([parameter, sparse, torch.ones(2, requires_grad=True)])
    assert isinstance(got_parameter, torch.nn.Parameter)
    assert torch.equal(got_parameter.data, torch.ones(3))
    assert torch.equal(got_sparse.to_dense(), torch.eye(3))
    assert got_grad.tolist() == [1, 1]


def test_tensors_travel_beside_the_pickle_not_in_it() -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = dumps({"pixel_values": torch.zeros(10_000)}, buffers.append)
    assert len(head) < 500
    assert [b.raw().nbytes for b in buffers] == [40_000]


def test_nothing_is_held_in_shared_memory_or_descriptors() -> None:
    files, memory = open_files(), shared_memory_files()
    packed = [dumps({f"t{i}": torch.zeros(100) for i in range(6)}) for _ in range(300)]
    unpacked = [loads(p) for p in packed]
    assert len(unpacked) == 300
    assert open_files() == files
    assert shared_memory_files() == memory


def test_a_batch_larger_than_the_socket_buffers_arrives_and_is_followed_by_the_next_message() -> None:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    batch = {"pixel_values": torch.arange(2_000_000), "more": torch.ones(3, dtype=torch.bfloat16)}
    info = StepInfo(
        epoch=0, step=1, round=0, idle=False, last=True, indices=(4, 2), lengths=(3, 5), loss_tokens=6, tokens=8,
        padded_tokens=10, work=12, global_samples=4, global_loss_tokens=9, global_tokens=16, global_padded_tokens=20,
        global_work=25, global_dropped=1, dropped=(Dropped(9, "overlong"),),
    )  # fmt: skip
    end_of_epoch = EpochEnd(
        epoch=0, steps=2, rounds=1, left=0, dropped=(), global_dropped=0, exchanges=4, exchange_bytes=8
    )

    def send_all() -> None:
        for message in ((batch, info), Phase("x"), end_of_epoch):
            send(left, message)

    sender = threading.Thread(target=send_all)
    sender.start()
    with left, right:
        got_batch, got_info = receive(right)
        assert torch.equal(got_batch["pixel_values"], batch["pixel_values"])
        assert same(got_batch["more"], batch["more"])
        assert got_info == info
        assert got_info.samples == 2
        assert receive(right) == Phase("x")
        assert receive(right) == end_of_epoch
        sender.join(10)


def test_the_end_of_the_peer_is_an_eof_error_between_and_within_messages() -> None:
    left, right = socket.socketpair()
    with right:
        send(left, Phase("whole"))
        left.sendall(struct.pack("!I", 1) + struct.pack("!Q", 100) + b"only a part")
        left.close()
        assert receive(right) == Phase("whole")
        with pytest.raises(EOFError, match="closed"):
            receive(right)
    left, right = socket.socketpair()
    with right:
        left.close()
        with pytest.raises(EOFError, match="closed"):
            receive(right)


def test_sending_to_a_peer_that_is_gone_is_an_os_error() -> None:
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
        send(left, {"x": torch.zeros(1_000_000)})


def test_a_serialised_sample_has_large_tensors_beside_it_in_their_own_memory() -> None:
    sample = {"small": torch.arange(5), "large": torch.arange(LARGE), "strided": torch.zeros(LARGE, 2)[:, 0]}
    content = serialise(sample)
    assert len(content.buffers) == 2
    assert content.nbytes == len(content.head) + LARGE * 8 + LARGE * 4
    own = content.copy().load()
    content.load()["large"][0] = 77
    assert int(sample["large"][0]) == 77, "the same memory"
    assert int(own["large"][0]) == 0
    assert int(own["small"][4]) == 4
