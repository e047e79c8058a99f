"""Stores of jobs: where they listen, and that nobody's word counts but that of the job's processes."""

import base64
import os
import pickle
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import HashStore

from launchers.backend import SignedBackend
from launchers.node import Node
from launchers.rendezvous import join
from megamem.errors import ConfigError
from megamem.parallel.control import Messages, Signer, new_token, serve_store

SHORT = timedelta(seconds=5)


def listening(port):
    """The addresses at which this machine listens on a port, as /proc has them."""
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return re.findall(rf" ([0-9A-F]+):{port:04X} [0-9A-F]+:0000 0A ", tables)


class TestWhereStoresListen:
    def test_one_machine(self):
        store = serve_store(0, SHORT, loopback=True)
        assert listening(store.port) == ["0100007F"], "127.0.0.1"
        store.set("a", "b")
        assert TCPStore("127.0.0.1", store.port, is_master=False, timeout=SHORT).get("a") == b"b"

    def test_several_machines(self):
        store = serve_store(0, SHORT, loopback=False)
        assert listening(store.port) == ["0" * 32], "all networks"

    def test_both_stores_of_a_node_that_is_alone(self):
        """Whatever address it was told; the second is that of the ranks, and where they are told to find it."""
        rendezvous = join(Node(1, "job", address=socket.gethostname(), join_s=20))
        try:
            met = rendezvous.next_rendezvous()
            told = met.bootstrap_store_info
            assert told.master_addr == "127.0.0.1"
            for port in (rendezvous._store.port, told.master_port):
                assert listening(port) == ["0100007F"]
        finally:
            rendezvous.shutdown()

    def test_nodes_without_a_token_are_refused(self):
        with pytest.raises(ConfigError, match="MEGAMEM_JOB_TOKEN: not set, and a job of several nodes needs it"):
            join(Node(1, "job", node_counts=(2,)))


class TestMessages:
    def test_what_is_written_is_read(self):
        store, token = HashStore(), new_token()
        Messages(store, Signer(token), "part").write("key", "ä|1")
        messages = Messages(store, Signer(token), "part")
        assert messages.read("key") == messages.awaited("key") == "ä|1"
        assert messages.read("other") is None

    @pytest.mark.parametrize("raw", ["", "5", "\0" * 70, "0" * 64 + "5", b"\xff\xfe"])
    def test_what_others_write_is_ignored_counted_and_said_once(self, raw, capsys):
        store, signer = HashStore(), Signer("token")
        messages = Messages(store, signer, "part")
        store.set("part/code", raw)
        assert messages.read("code") is messages.awaited("code") is None
        assert signer.ignored == 2
        said = capsys.readouterr().err
        assert said.startswith("megamem: ignored what stands at 'part/code' in the job's store")
        assert said.count("\n") == 1

    def test_another_token_another_key_and_another_part_are_others(self):
        store, signer = HashStore(), Signer("token")
        Messages(store, Signer("other"), "part").write("a", "1")
        Messages(store, signer, "part").write("b", "1")
        for key in ("part/c", "next/b"):
            store.set(key, store.get("part/b").decode())
        assert Messages(store, signer, "part").read("a") is None
        assert Messages(store, signer, "part").read("c") is None
        assert Messages(store, signer, "next").read("b") is None
        assert signer.ignored == 3

    def test_the_first_counts_unless_it_is_a_strangers(self):
        store = HashStore()
        messages = Messages(store, Signer("token"), "part")
        store.set("part/code", "0")
        assert messages.write_first("code", "5") == "5"
        assert messages.write_first("code", "6") == "5"

    def test_a_count_of_numbers(self):
        store = HashStore()
        messages = Messages(store, Signer("token"), "part")
        messages.write("left/1", "yes")
        store.set("part/left/2", "yes")
        assert messages.count("left", 3) == 1


class TestTheStateOfTheRendezvous:
    """torchrun unpickles it."""

    KEY = "torch.rendezvous.job"

    def backends(self):
        store, token = HashStore(), new_token()
        return store, [SignedBackend(store, "job", Signer(token)) for _ in range(2)]

    def test_nodes_write_over_what_they_have_read(self):
        _, (one, other) = self.backends()
        assert one.get_state() is None
        state, token, is_ours = one.set_state(b"first")
        assert (state, is_ours) == (b"first", True)
        assert other.get_state() == (b"first", token)
        assert other.set_state(b"late") == (b"first", token, False)
        state, later, is_ours = other.set_state(b"second", token)
        assert (state, is_ours) == (b"second", True)
        assert one.set_state(b"third", token) == (b"second", later, False)
        assert one.set_state(b"third", 3) == (b"second", later, False), "no token of this store"

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("raw", ["pickle", "not base64!", "Y2FuaW1hZGFt"])
    def test_a_strangers_is_not_believed(self, known, raw, tmp_path):
        store, (one, other) = self.backends()
        if known:
            one.set_state(b"state")
            assert other.get_state()[0] == b"state"
        bomb = pickle.dumps(_Bomb(str(tmp_path / "harm")))
        store.set(self.KEY, base64.b64encode(bomb).decode() if raw == "pickle" else raw)
        found = other.get_state()
        assert found == (one._last if known else None)
        state, _, is_ours = other.set_state(b"next", found and found[1])
        assert (state, is_ours) == (b"next", True), "the job goes on"
        assert not (tmp_path / "harm").exists()


class _Bomb:
    """What runs a function where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
