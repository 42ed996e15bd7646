"""What is here of sharded tensors is read anew at each call: nothing that is remembered stands for what has changed."""

import types

import pytest
import torch

from fastguard import kernels
from fastguard.kernels import cpu
from fastguard.ranks import exchange

pytestmark = pytest.mark.skipif(cpu.ShardPlan is None, reason="the extension is not built")


class Mesh:
    def size(self, _=None):
        return 4


class Placement:
    """Equal by kind, as torch's are."""

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return isinstance(other, Placement) and other.kind == self.kind

    __hash__ = None

    def is_replicate(self):
        return self.kind == "replicate"

    def is_partial(self):
        return self.kind == "partial"


class Part(torch.Tensor):
    """A tensor that keeps what is here of it as a DTensor does."""

    __slots__ = ["_local_tensor", "_spec"]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, call, *_):
        raise AssertionError(f"{call} was asked for")

    @property
    def device_mesh(self):
        return self._spec.mesh

    def to_local(self):
        return self._local_tensor


MESH = Mesh()


def part(local, kind="shard", mesh=MESH):
    x = torch.Tensor._make_wrapper_subclass(Part, local.shape, dtype=local.dtype)
    x._local_tensor = local
    x._spec = types.SimpleNamespace(mesh=mesh, placements=(Placement(kind),))
    return x


def several(count=40):
    return [part(torch.randn(i % 7, 3)) for i in range(count)]


def times(found):
    assert found is not None
    count = found.replication(4)
    return [1.0] if count is None else count.flatten().tolist()


def meshes(found):
    return [layout.mesh for layout in found.layouts]


@pytest.fixture
def reader():
    return exchange.PieceReader()


def read(reader, tensors):
    return reader.quick("tensor", tensors, "cpu")


def test_the_quick_way_says_what_each_tensor_alone_would(reader):
    tensors = [*several(), torch.randn(5), part(torch.randn(2).double(), "replicate"), part(torch.ones(3).half().t())]
    for _ in range(2):
        quick = read(reader, tensors)
        assert quick is not None
        slow = exchange.measured(tensors, tensors, "cpu")
        assert quick.table == slow.table and quick.layouts == slow.layouts and meshes(quick) == [MESH, MESH]
        assert quick.total == kernels.fold_rows(slow.table) and quick.dtypes == slow.dtypes
        assert times(quick) == times(slow) == [1.0] * 40 + [4.0, 4.0, 1.0]
        assert all(a is b for a, b in zip(quick.local, slow.local, strict=True))


def test_what_changes_between_calls_is_seen(reader):
    tensors = several()
    assert times(read(reader, tensors)) == [1.0]
    tensors[3]._local_tensor = torch.tensor([3.0, 4.0])  # another part
    found = read(reader, tensors)
    assert found is not None and torch.frombuffer(found.table, dtype=torch.float64).view(40, -1)[3, 1] == 25.0
    tensors[5]._spec.placements = (Placement("replicate"),)  # the same description says something else
    assert times(read(reader, tensors)) == [1.0] * 5 + [4.0] + [1.0] * 34
    tensors[5]._spec = types.SimpleNamespace(mesh=Mesh(), placements=(Placement("shard"),))  # another one
    found = read(reader, tensors)
    assert times(found) == [1.0] and found is not None and set(meshes(found)) == {MESH, tensors[5]._spec.mesh}
    assert times(read(reader, tensors[::-1])) == [1.0]
    tensors[7]._spec.placements = (Placement("partial"),)
    assert read(reader, tensors) is None  # has to be summed over the ranks first


@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(3).to_sparse(),
        torch.arange(3),
        torch._neg_view(torch.ones(3)),
        torch.ones(3, device="meta"),
        part(torch.ones(3)),
    ],
    ids=["sparse", "integers", "negative", "meta", "itself a part"],
)
def test_what_is_no_plain_memory_is_left_to_the_long_way(reader, odd):
    x = part(torch.ones(3))
    x._local_tensor = odd
    assert read(reader, [*several(), x]) is None
    assert read(reader, [*several(), object()]) is None
    assert read(reader, [torch.ones(3)]) is None  # nothing is sharded


def test_many_meshes_are_forgotten(reader):
    for _ in range(5):
        tensors = [part(torch.ones(2), mesh=Mesh()) for _ in range(50)]
        found = read(reader, tensors)
        assert found is not None and len(meshes(found)) == 50 and times(found) == [1.0]
        assert len(reader._plan.known) <= 128


def test_parameters_without_gradients_tell_their_mesh(reader):
    params = [part(torch.zeros(3)) for _ in range(3)]
    params[1].grad = part(torch.tensor([3.0, 0.0, 4.0]))
    params[2]._spec.mesh = Mesh()
    params[1].grad._spec.mesh = params[1]._spec.mesh = Mesh()
    found = reader.quick("gradient", [params[:2], params[2:]], "cpu", 2.0)
    assert found is not None and found.total[1] == 100.0 and found.present == [1]
    assert {*map(id, meshes(found))} == {id(p._spec.mesh) for p in params}
    assert found.fingerprint == kernels.collect_gradients([params[:2], params[2:]])[2]
    params[1].grad = None
    nothing = reader.quick("gradient", [params], "cpu", 1.0)
    assert nothing is not None and nothing.local == [] and len(meshes(nothing)) == 3 and nothing.table == b""
