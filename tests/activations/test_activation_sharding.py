"""Monitors under DistributedDataParallel and fully_shard, one process with gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fastguard import ActivationMonitor

from activation_models import Transformer

NAMES = {"blocks.0.attn", "blocks.1.mlp.1", "norm", "Transformer"}


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo here")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("watch_inner", [False, True])
def test_under_ddp(watch_inner):
    net = Transformer()
    model = torch.nn.parallel.DistributedDataParallel(net)
    monitor = ActivationMonitor(net if watch_inner else model, every=2, overhead_budget=None)
    for _ in range(3):
        model(torch.randint(0, 11, (2, 5))).sum().backward()
    names = {record.name for record in monitor.activities}
    assert names >= NAMES and not any("module" in name for name in names)
    assert monitor.cost.num_steps == 3 and monitor.cost.num_samples == 2


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's own
def test_under_fully_shard():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Transformer()
    mesh = init_device_mesh("cpu", (1,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    monitor = ActivationMonitor(net, every=2, overhead_budget=None)
    for _ in range(3):
        net(torch.randint(0, 11, (2, 5))).sum().backward()
    assert {record.name for record in monitor.activities} >= NAMES
    assert monitor.cost.num_samples == 2
