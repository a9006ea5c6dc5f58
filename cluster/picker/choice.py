"""Chooses the routers that a request may go to. Pure: what the routers tell, what the request asks -> endpoints.

    made at one router (a kept response)   that one, while it is reached, ready or not: no other knows it
    repeated (an idempotency key)          the same one each time, unless it has far more to do than the others
    every other                            the one with the least to do; in turn where several have as little

Which workers compute it is the router's choice, which has the tokens and knows every worker's prefix cache. What is
refused here the router would refuse too: by the count of its requests, or because its policy predicts that even the
least request would get its first token too late (admission.py). The rest it decides itself; and what computes nothing
is never refused.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...workers.common.errors import Overloaded, Unavailable
from ..common.admission import RouterLoad, RouterOutlook

BOUND = 1.25  # of the mean load: beyond it, a repeated request goes elsewhere
FAR, FAR_S = 2.0, 0.05  # a router is far from the workers where it predicts so many times the least, and so much later


@dataclass(frozen=True, slots=True)
class RouterView:
    """Router as the picker knows it."""

    endpoint: str  # ip:port of its HTTP port
    load: RouterLoad | None = None  # None: it has told nothing yet
    is_reachable: bool = False
    num_sent: int = 0  # requests sent there since it told

    @property
    def is_ready(self) -> bool:
        return self.is_reachable and self.load is not None and self.load.ready

    @property
    def outlook(self) -> RouterOutlook:
        """Its outlook, with the requests that it did not know of when it told. It must have told."""
        assert self.load is not None
        found = self.load.outlook
        return replace(found, num_requests=found.num_requests + self.num_sent) if self.num_sent else found


@dataclass(frozen=True, slots=True)
class RouterAsk:
    """Facts of a request by which a router is chosen."""

    subset: frozenset[str] | None = None  # endpoints, or addresses alone, that it may go to; None: all
    call: str = ""  # id of the call that made what it refers to: it begins with its router's tag; empty: to nothing
    key: str = ""  # equal for a request and its repetitions; empty: it is not repeated
    ttft_s: float | None = None  # it would rather be refused than get its first token later; None: it waits
    is_sheddable: bool = False  # it is refused where requests miss the cluster's level, whatever theirs
    turn: int = 0  # a number that differs from request to request
    computes: bool = True  # it takes one of the places that a router has


def pick(views: Sequence[RouterView], ask: RouterAsk, num: int = 1) -> list[str]:
    """Endpoints of at most `num` routers, the best first. Raises Unavailable where none is ready, or what the request
    refers to is at one that is not reached; Overloaded where the request is refused."""
    allowed = views if ask.subset is None else [v for v in views if is_allowed(v.endpoint, ask.subset)]
    owner = [view for view in allowed if _has_made(view, ask.call)]
    usable = [view for view in owner if view.is_reachable] if owner else [view for view in allowed if view.is_ready]
    if not usable:
        raise _owner_lost() if owner else _none_ready(views, allowed)
    able = [(view, view.outlook) for view in usable]
    if ask.computes:
        able = _unless_refused(_with_room(able), ask)
    return [view.endpoint for view, _ in _ordered(able, ask)[:num]]


def _has_made(view: RouterView, call: str) -> bool:
    return bool(call) and view.load is not None and bool(view.load.tag) and call.startswith(view.load.tag)


def is_allowed(endpoint: str, subset: frozenset[str]) -> bool:
    return endpoint in subset or endpoint.rpartition(":")[0].strip("[]") in subset


_Able = list[tuple[RouterView, RouterOutlook]]


def _with_room(usable: _Able) -> _Able:
    """Routers that have a place for a request. Raises Overloaded."""
    able = [each for each in usable if each[1].excess(1) is None]
    if not able:
        raise _soonest([outlook.excess(1) for _, outlook in usable])
    return able


def _unless_refused(able: _Able, ask: RouterAsk) -> _Able:
    """Routers that would not refuse the least request like it. Raises Overloaded."""
    if ask.ttft_s is None and not ask.is_sheddable:
        return able
    refusals = [_refusal(outlook, ask) for _, outlook in able]
    if all(refusals):
        raise _soonest(refusals)
    return [each for each, refused in zip(able, refusals, strict=True) if refused is None]


def _refusal(outlook: RouterOutlook, ask: RouterAsk) -> Overloaded | None:
    refused = None if ask.ttft_s is None else outlook.misses(ask.ttft_s)
    return refused or (outlook.misses(outlook.level.ttft_s) if ask.is_sheddable else None)


def _ordered(able: _Able, ask: RouterAsk) -> _Able:
    shares = {view.endpoint: outlook.num_requests / outlook.max_requests for view, outlook in able}
    if ask.key:
        # Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni et al., 2018).
        bound = BOUND * sum(shares.values()) / len(shares)
        return sorted(
            able,
            key=lambda each: (
                shares[each[0].endpoint] > bound + 1 / each[1].max_requests,
                _rank(ask.key, each[0].endpoint),
            ),
        )
    least_s = min((o.now.ttft_s for _, o in able if o.now is not None), default=0.0)
    first = ask.turn % len(able)
    turned = able[first:] + able[:first]
    return sorted(turned, key=lambda each: (_is_far(each[1], least_s), shares[each[0].endpoint]))


def _is_far(outlook: RouterOutlook, least_s: float) -> bool:
    """Return whether the router predicts much later first tokens than another one: it lacks links to some workers."""
    return outlook.now is not None and outlook.now.ttft_s > FAR * least_s + FAR_S


def _rank(key: str, endpoint: str) -> bytes:
    return hashlib.blake2b(f"{endpoint} {key}".encode(errors="replace"), digest_size=8).digest()


def _soonest(refusals: Sequence[Overloaded | None]) -> Overloaded:
    """The refusal that helps a client most: one that says when to come again, the soonest."""
    found = [refused for refused in refusals if refused is not None]
    return min(found, key=lambda refused: (not refused.retry_helps, refused.retry_after_s))


def _owner_lost() -> Unavailable:
    return Unavailable(
        "the router that keeps what the request refers to is not reached, and no other has it: try again in a moment"
    )


def _none_ready(views: Sequence[RouterView], allowed: Sequence[RouterView]) -> Unavailable:
    num_lost = sum(not view.is_reachable for view in allowed)
    where = f"{len(views)} known" if len(allowed) == len(views) else f"{len(allowed)} of {len(views)} in the subset"
    return Unavailable(
        f"no router is ready ({where}, {num_lost} of them not reached): see the routers' GET /health, or try again "
        "in a moment"
    )
