"""Three engines, and moves between them in any order: every token once, no block lost."""

import random

import pytest

from diptych.workers.engine.engine import Engine
from diptych.workers.handoff.types import Reservation
from diptych.workers.testing.fake_runner import fake_output

from ...support.engines import Move, assert_clean, make, reserve
from ...support.sequences import make_request

NUM_STEPS = 150
MAX_TOKENS = 16


class World:
    """Requests by number; each runs on one engine at a time, under a new key on each engine."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        blocks, is_cached = self.rng.choice([12, 20, 64]), self.rng.random() < 0.7
        self.engines = [make(num_blocks=blocks, prefix_cache=is_cached, max_batch_tokens=9) for _ in range(3)]
        self.haste = self.rng.choice([0.0, 0.6])  # of sinks
        self.offers = self.rng.choice([1, 5])  # at a time
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.at: dict[int, tuple[Engine, str]] = {}
        self.moves: dict[int, Move] = {}
        self.prefixes: dict[int, Move] = {}
        self.number = 0

    def name(self) -> str:
        self.number += 1
        return f"0/{self.number}"

    def submit(self) -> None:
        """Perhaps with a prefix from elsewhere, that is then pulled, or not."""
        number = len(self.prompts)
        prompt = [self.rng.choice([1, 2, 3])] * self.rng.randint(1, 24)
        engine, holder = self.rng.sample(self.engines, 2)
        key, pulls = self.name(), self.rng.random() < 0.4
        self.prompts[number], self.tokens[number], self.at[number] = prompt, [], (engine, key)
        engine.submit(key, make_request(prompt, MAX_TOKENS), [], prefix=pulls)
        if pulls:
            move = self.prefixes[number] = Move(holder, engine, key, handoff_id=self.name())
            holder.outgoing.offer_prefix(move.handoff_id, prompt, b"")

    def offer(self) -> None:
        """To a sink that knows some of the tokens so far."""
        number = self.rng.choice([n for n in self.at if n not in self.moves] or [-1])
        if number < 0 or not self.tokens[number]:
            return
        source, key = self.at[number]
        sink = self.rng.choice([e for e in self.engines if e is not source])
        move = self.moves[number] = Move(source, sink, self.name(), handoff_id=self.name())
        source.outgoing.offer(key, move.handoff_id)
        known = self.tokens[number][: self.rng.randint(0, len(self.tokens[number]))]
        sink.submit(move.key, make_request(self.prompts[number], MAX_TOKENS), known, importing=True)

    def advance(self, number: int, moves: dict[int, Move]) -> None:
        """One thing that the network may do next for a hand-off."""
        move, roll = moves[number], self.rng.random()
        can_lapse = move.sealed is None or move.has_begun
        if (can_lapse and roll < 0.05) or move.over is not None:  # or the source gave up
            self.give_up(number, moves)
        elif move.opened is None:
            return
        elif move.reservation is None:
            granted = reserve(move.sink, move.key, move.opened.num_tokens)
            if isinstance(granted, Reservation):
                move.reservation = granted
            else:  # none is left (the answer would come later), or no use for it: it is given up
                self.give_up(number, moves)
        elif move.sealed is not None and not move.has_begun and roll < 0.5:
            move.begin()
        elif move.sealed is not None:
            move.commit()
            if moves is self.moves:
                self.at[number] = move.sink, move.key
            del moves[number]
        elif roll < 0.1 + self.haste:
            move.read()
            if self.rng.random() < 0.1 + self.haste:
                move.source.caught_up(move.handoff_id)

    def give_up(self, number: int, moves: dict[int, Move]) -> None:
        """A sealed sequence is then nowhere: it is computed again."""
        move = moves.pop(number)
        move.hear([])
        move.sink.fail_import(move.key, quarantine=False)
        move.source.end_lease(move.handoff_id)
        if moves is self.moves and move.sealed is not None:
            engine, key = self.rng.choice(self.engines), self.name()
            self.at[number] = engine, key
            engine.submit(key, make_request(self.prompts[number], MAX_TOKENS), self.tokens[number])

    def step(self) -> None:
        for engine in self.engines:
            output = engine.step()
            assert not output.failures or all(f.key in {m.key for m in self.moves.values()} for f in output.failures)
            for move in [*self.moves.values(), *self.prefixes.values()]:
                if move.source is engine:
                    move.hear([output])
            for event in output.tokens:
                number = next((n for n, (e, key) in self.at.items() if e is engine and key == event.key), None)
                assert number is not None, "a sequence runs in two places"
                assert event.position == len(self.tokens[number]), "a token twice, or one is missing"
                self.tokens[number].append(event.token_id)
                if event.finish is not None:
                    del self.at[number]
            assert engine.check_integrity().num_unaccounted_blocks == 0

    def tend(self) -> None:
        for moves in (self.moves, self.prefixes):
            for number in list(moves):
                self.advance(number, moves)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_comes_once_wherever_sequences_go(seed: int) -> None:
    world = World(seed)
    for _ in range(NUM_STEPS):
        roll = world.rng.random()
        if roll < 0.2:
            world.submit()
        elif roll < 0.5:
            for _ in range(world.offers):
                world.offer()
        world.step()
        world.tend()
    for _ in range(2000):
        if not (world.at or world.moves or world.prefixes):
            break
        world.step()
        world.tend()
    assert world.tokens == {n: fake_output(prompt, MAX_TOKENS) for n, prompt in world.prompts.items()}
    assert not world.haste or sum(e.check_integrity().load.num_migrated_out for e in world.engines) > 0
    for engine in world.engines:
        assert_clean(engine)
