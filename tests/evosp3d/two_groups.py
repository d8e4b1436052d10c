"""One of two ranks that is in one process group after another, as a worker with several points."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megafold.evosp3d.mesh import make_mesh
from megafold.train.ranks import Membership, device_of, find_place


def main(kind: str) -> None:
    place = find_place()
    device = device_of(place, kind)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=place.rank == 0, timeout=timedelta(seconds=60))
    for point in range(3):
        member = Membership(dist.PrefixStore(f"point-{point}", store), place, device, timeout_s=60)
        for dp, sp in ((1, 2), (2, 1)):
            group = make_mesh(dp, sp, device.type).get_group("sp")
            found = torch.full((3,), float(place.rank + point), device=device)
            dist.all_reduce(found, group=group)
            assert found.tolist() == [1.0 + 2 * point] * 3 if sp == 2 else [float(place.rank + point)] * 3
        member.leave()
        print(f"left {point}", flush=True)
    store.set(f"done-{place.rank}", "")
    store.wait([f"done-{rank}" for rank in range(2)], timedelta(seconds=60))


if __name__ == "__main__":
    main(*sys.argv[1:])
