"""Both ends of a connection between ranks know the token, or neither goes on."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from diptych.workers.common.errors import RankLost
from diptych.workers.parallel.sockets import set_deadline
from diptych.workers.ranks.link_auth import NONCE_BYTES, prove_to_caller, prove_to_listener


def meet(of_caller: str | None, of_listener: str | None) -> tuple[BaseException | None, BaseException | None]:
    """What each end says of the other."""
    caller, listener = socket.socketpair()
    for link in (caller, listener):
        set_deadline(link, 20.0)

    def prove(end: socket.socket, prover: object, token: str | None) -> BaseException | None:
        try:
            prover(end, token)  # type: ignore[operator]
        except (RankLost, OSError) as e:
            return e
        finally:
            end.shutdown(socket.SHUT_WR)
        return None

    with caller, listener, ThreadPoolExecutor(2) as threads:
        ours = threads.submit(prove, caller, prove_to_listener, of_caller)
        theirs = threads.submit(prove, listener, prove_to_caller, of_listener)
        return ours.result(), theirs.result()


@pytest.mark.parametrize("token", ["secret", None])
def test_who_knows_the_token_goes_on(token: str | None) -> None:
    assert meet(token, token) == (None, None)


@pytest.mark.parametrize(("of_caller", "of_listener"), [("one", "other"), (None, "other"), ("one", None)])
def test_who_does_not_is_refused_by_both(of_caller: str | None, of_listener: str | None) -> None:
    ours, theirs = meet(of_caller, of_listener)
    assert isinstance(ours, RankLost) and "another token" in str(ours)
    assert isinstance(theirs, ConnectionError)  # the caller leaves before it would prove anything


def test_a_caller_cannot_prove_itself_by_what_the_listener_said() -> None:
    caller, listener = socket.socketpair()
    with caller, listener, ThreadPoolExecutor(1) as thread:
        proven = thread.submit(prove_to_caller, listener, "secret")
        caller.sendall(bytes(NONCE_BYTES))
        said = caller.recv(2 * NONCE_BYTES)
        caller.sendall(said[NONCE_BYTES:])
        with pytest.raises(RankLost, match="another token"):
            proven.result()


def test_a_caller_that_says_nothing_is_not_waited_for() -> None:
    caller, listener = socket.socketpair()
    with caller, listener:
        set_deadline(listener, 0.01)
        with pytest.raises(BlockingIOError):
            prove_to_caller(listener, "secret")
