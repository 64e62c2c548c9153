"""The handshake, without sockets: who knows the secret and is meant convinces the other side, and nobody else does."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.libraries import need

need("msgspec")

from weft import errors  # noqa: E402
from weft.ray.handshake import FORMAT, MOST_TEXT, NONCE, PROOF, ClientHandshake, Secret, ServerHandshake  # noqa: E402

KEY = bytes(range(32))
SECRET = Secret(KEY)
ID = "the server's id"


def client(secret=SECRET, server_id=ID, text="client 1"):
    return ClientHandshake(secret, server_id, text)


def server(secret=SECRET, server_id=ID, text="server 1"):
    return ServerHandshake(secret, server_id, text)


def refused(function, *arguments):
    with pytest.raises(errors.UnavailableError):
        function(*arguments)


def test_two_that_know_the_secret():
    here, there = client(), server()
    challenge = there.challenge(here.hello)
    proof = here.answer(challenge)
    assert here.server_text == "server 1"
    assert there.client_text == ""  # it is not proved yet
    there.check(proof)
    assert there.client_text == "client 1"
    for message in (here.hello, challenge, proof):
        for size in range(4, len(KEY) + 1):
            assert KEY[:size] not in message


def test_another_secret_or_another_server():
    for other in (client(secret=Secret(b"w" * 32)), client(server_id="another"), client(server_id="")):
        refused(other.answer, server().challenge(other.hello))
        assert other.server_text == ""
    for other in (server(secret=Secret(b"w" * 32)), server(server_id="another")):
        here, there = client(), server()
        there.challenge(here.hello)
        made = client()  # a proof for another server, or with another secret
        made.hello = here.hello
        refused(there.check, b"x" * PROOF)
        refused(made.answer, other.challenge(made.hello))


def test_a_stranger_cannot_use_a_server_that_lives_as_one_that_died():
    """The stranger has the dead one's address, and passes everything on to a server of the same deployment."""
    here, living = client(server_id="dead"), server(server_id="living")
    refused(here.answer, living.challenge(here.hello))


def test_what_is_sent_back_proves_nothing():
    here = client()
    refused(here.answer, here.hello)
    refused(here.answer, here.hello + bytes(PROOF))
    there = server()
    challenge = there.challenge(here.hello)
    shown = challenge[1 + NONCE : 1 + NONCE + PROOF]
    refused(there.check, shown)  # the server's own proof, as the client's
    proof = here.answer(challenge)
    again = client()
    again.hello = here.hello
    refused(
        again.answer, challenge[: 1 + NONCE] + proof + challenge[1 + NONCE + PROOF :]
    )  # the client's, as the server's


def test_a_connection_the_other_way_round_gives_no_proof():
    """A stranger between two processes that are both clients and servers, with one id: it lets each prove itself to the other."""
    first, second = server(), server()
    one, other = client(), client()
    challenge = second.challenge(one.hello)
    refused(first.check, one.answer(challenge))
    refused(other.answer, challenge)


def test_what_was_recorded_is_worth_nothing():
    here, there = client(), server()
    challenge = there.challenge(here.hello)
    proof = here.answer(challenge)
    there.check(proof)
    refused(client().answer, challenge)
    later = server()
    later.challenge(here.hello)
    refused(later.check, proof)


def test_nonces_are_new_each_time():
    assert len({client().hello for _ in range(100)}) == 100
    hello = client().hello
    assert len({server().challenge(hello)[: 1 + NONCE] for _ in range(100)}) == 100


def changed(message):
    """All messages that differ in one byte, and shorter and longer ones."""
    for i in range(len(message)):
        yield message[:i] + bytes([message[i] ^ 1]) + message[i + 1 :]
        yield message[:i]
        yield message[:i] + message[i + 1 :]
    yield message + b"\0"
    yield b"\0" + message


def test_a_changed_challenge_is_refused():
    here = client()
    for challenge in changed(server().challenge(here.hello)):
        refused(here.answer, challenge)


def test_a_changed_proof_is_refused():
    here, there = client(), server()
    proof = here.answer(there.challenge(here.hello))
    for other in changed(proof):
        refused(there.check, other)
    there.check(proof)


def test_a_hello_that_was_changed_on_the_way_is_noticed():
    """So nobody can make a side take another version than the other side's."""
    for other in changed(client().hello):
        here, there = client(), server()
        other = bytes(other[:1]) + here.hello[1 : 1 + NONCE] + other[1 + NONCE :]
        if other == here.hello:
            continue
        try:
            challenge = there.challenge(other)
        except errors.UnavailableError:
            continue
        refused(here.answer, challenge)


def test_bytes_cannot_move_between_the_parts():
    here, there = client(text="ab"), server(server_id=ID[:-1], text=ID[-1:])
    refused(here.answer, there.challenge(here.hello))
    assert SECRET.proof(b"client", b"ab", b"c") != SECRET.proof(b"client", b"a", b"bc")
    assert SECRET.proof(b"client", b"", b"ab") != SECRET.proof(b"client", b"ab")
    assert SECRET.proof(b"clienta", b"b") != SECRET.proof(b"client", b"ab")


@given(st.binary(max_size=2 * MOST_TEXT))
def test_anything_else_is_refused(data):
    refused(client().answer, data)
    there = server()
    refused(there.check, data)  # before the hello
    if data[:1] != bytes([FORMAT]) or not 1 + NONCE <= len(data) <= 1 + NONCE + PROOF + MOST_TEXT:
        refused(there.challenge, data)
    else:
        assert len(there.challenge(data)) < 512
        refused(there.check, data)
        refused(there.challenge, data)


def test_a_connection_has_one_hello():
    here, there = client(), server()
    challenge = there.challenge(here.hello)
    refused(there.challenge, here.hello)
    there.check(here.answer(challenge))


def test_another_format_is_refused():
    refused(server().challenge, bytes([FORMAT + 1]) + client().hello[1:])
    here = client()
    challenge = server().challenge(here.hello)
    refused(here.answer, bytes([0]) + challenge[1:])


def test_texts_have_a_limit():
    with pytest.raises(errors.InvalidArgumentError, match="at most 255 bytes, got 256"):
        client(text="x" * 256)
    here, there = client(text="x" * 255), server(text="y" * 255)
    there.check(here.answer(there.challenge(here.hello)))
    assert (here.server_text, there.client_text) == ("y" * 255, "x" * 255)


def test_a_secret_shows_itself_to_nobody():
    for shown in (repr(SECRET), str(SECRET), f"{SECRET}", repr([SECRET]), repr(vars(client())), repr(vars(server()))):
        assert "x00\\x01" not in shown
        assert "010203" not in shown
    for twin in (pickle.loads(pickle.dumps(SECRET)), copy.deepcopy(SECRET)):
        assert twin == SECRET
        assert twin.proof(b"client") == SECRET.proof(b"client")
    assert Secret.new() != Secret.new()
    assert len(Secret.new().reveal()) == 32
    assert SECRET != KEY


@pytest.mark.parametrize("key", [b"", b"short", "a text of more than sixteen", None, bytearray(32)])
def test_what_is_no_secret(key):
    with pytest.raises(errors.InvalidArgumentError, match="at least 16 random bytes"):
        Secret(key)
