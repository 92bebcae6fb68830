"""The law FINISH, on the reader that ships: a dead producer's words are final, and are looked at once more."""

from __future__ import annotations

import pytest

from tensorferry.codecs.errors import PeerGone
from tensorferry.codecs.messages import Proxy
from tensorferry.codecs.pool import attached_pool as imported_module
from tensorferry.codecs.pool.pool import Lease, Pool
from tensorferry.codecs.pool.reader import Reader
from tensorferry.codecs.tensors import CODES


def proxy_of(pool: Pool, lease: Lease) -> Proxy:
    slot, generation, offset, _ = lease.grant
    return Proxy(pool.description.pool, slot, generation, offset, CODES["uint8"], (lease.nbytes,))


@pytest.mark.parametrize("in_time", [True, False])
def test_ready_may_come_between_a_look_and_the_death(monkeypatch: pytest.MonkeyPatch, in_time: bool) -> None:
    with Pool.create(4096, 4) as pool, Reader() as reader:
        attachment, fds = reader.attach(*pool.export())
        pool.admit(attachment, fds)
        with pool.lease(8) as lease:
            lease.data[:] = 7
            assert not reader.is_ready(proxy_of(pool, lease))

            def dies_now(pidfd: int) -> bool:
                if in_time:
                    lease.publish()
                return True

            monkeypatch.setattr(imported_module, "is_dead", dies_now)
            if in_time:
                with reader.open(proxy_of(pool, lease)) as view:
                    assert bytes(view.data) == b"\7" * 8
            else:
                with pytest.raises(PeerGone):
                    reader.is_ready(proxy_of(pool, lease))
