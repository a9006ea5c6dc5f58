"""The compiled experts compared with a loop over them; a row alone equals, bit for bit, the same row among others."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from diptych.kernels.cpu.experts import Gate, PackedExperts, experts
from diptych.kernels.cpu.formats import Format
from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.linear import Epilogue, pack
from diptych.workers.models.rounding.stored import as_stored_

GATES = [Gate(), Gate(Epilogue.GELU_MUL), Gate(Epilogue.CLAMPED_MUL, 1.702, 0.75)]


@dataclass
class Case:
    x: Tensor  # [T, H], surrounded by NaN
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor]

    def packed(
        self, team: Team, gate: Gate = GATES[0], first: int = 0, format: Format = Format.PLAIN, biased: bool = False
    ) -> PackedExperts:
        gate_bias, down_bias = self.biases if biased else ([None] * len(self.down),) * 2
        gate_ups = [pack(team, [w], b, gated=True, format=format) for w, b in zip(self.gate_up, gate_bias, strict=True)]
        downs = [pack(team, [w], b, format=format) for w, b in zip(self.down, down_bias, strict=True)]
        return PackedExperts(gate_ups, downs, self.ids.shape[1], gate, first)

    def twin(self, gate: Gate = GATES[0], first: int = 0, biased: bool = False) -> Tensor:
        """By torch, one expert after the other, in float64."""
        x, total = self.x.double(), torch.zeros(self.x.shape, dtype=torch.float64)
        for e in range(len(self.down)):
            rows, choice = torch.where(self.ids == first + e)
            biases = [of[e].double() if biased else None for of in self.biases]
            inner = linear(x[rows], self.gate_up[e].double(), biases[0])
            y = linear(gated(gate, *inner.chunk(2, dim=1)), self.down[e].double(), biases[1])
            total.index_add_(0, rows, y * self.weights[rows, choice, None])
        return total


def gated(gate: Gate, x: Tensor, up: Tensor) -> Tensor:
    match gate.epilogue:
        case Epilogue.SILU_MUL:
            return silu(x) * up
        case Epilogue.GELU_MUL:
            return gelu(x, approximate="tanh") * up
        case _:
            x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
            return (up + 1) * x * torch.sigmoid(gate.alpha * x)


def case(num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Case:
    """sizes: experts, top_k, hidden, inner."""
    count, top_k, hidden, inner = sizes
    torch.manual_seed(num_rows + hidden)
    x = torch.full((num_rows + 1, hidden + 5), torch.nan, dtype=dtype)[:-1, :hidden].copy_(
        torch.randn(num_rows, hidden)
    )
    weights, ids = torch.randn(num_rows, count).softmax(dim=1).topk(top_k)
    gate_up = (torch.randn(count, 2 * inner, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(count, hidden, inner) * inner**-0.5).to(dtype)
    biases = torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype)
    return Case(x, weights, ids.int(), gate_up, down, biases)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """The inner rows, each expert's output and their sum are rounded to the dtype."""
    error = 1.5e-2 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), wanted.double(), rtol=error, atol=error)


def test_is_its_twin(pair: Team, dtype: torch.dtype) -> None:
    for num_rows, *sizes in [
        (1, 1, 1, 1, 1),
        (3, 5, 2, 31, 17),
        (40, 7, 3, 66, 33),
        (300, 3, 2, 40, 16),
        (7, 64, 8, 90, 20),
    ]:
        of = case(num_rows, tuple(sizes), dtype)
        assert_near(experts(pair, of.x, of.weights, of.ids, of.packed(pair)), of.twin())


@pytest.mark.parametrize("gate", GATES, ids=["silu", "gelu", "clamped"])
def test_gates_and_biases(pair: Team, dtype: torch.dtype, gate: Gate) -> None:
    of = case(9, (6, 2, 40, 24), dtype)
    packed = of.packed(pair, gate, biased=True)
    assert_near(experts(pair, of.x, of.weights, of.ids, packed), of.twin(gate, biased=True))


@pytest.mark.parametrize("format", [Format.INT8, Format.INT4])
def test_quantised(pair: Team, dtype: torch.dtype, format: Format) -> None:
    of = case(70, (4, 2, 96, 64), dtype)
    found = experts(pair, of.x, of.weights, of.ids, of.packed(pair, format=format))
    for weights in (*of.gate_up, *of.down):
        as_stored_(weights, format)
    assert_near(found, of.twin())


def test_experts_elsewhere_add_nothing(pair: Team, dtype: torch.dtype) -> None:
    of = case(20, (12, 4, 48, 32), dtype)
    of.ids[3] = -1
    of.ids[5, 1:] = -1
    of.x[3] = torch.nan
    whole = experts(pair, of.x, of.weights, of.ids, of.packed(pair))
    assert (whole[3] == 0).all()
    parts = torch.zeros(20, 48)
    for first, last in ((0, 5), (5, 6), (6, 12)):
        share = Case(of.x, of.weights, of.ids, of.gate_up[first:last], of.down[first:last], of.biases)
        found = experts(pair, of.x, of.weights, of.ids, share.packed(pair, first=first))
        assert_near(found[4:], share.twin(first=first)[4:])
        parts += found
    assert_near(parts.to(dtype), whole)


def test_all_rows_to_one_expert(pair: Team, dtype: torch.dtype) -> None:
    of = case(500, (9, 1, 64, 32), dtype)
    of.ids[:] = 4
    assert_near(experts(pair, of.x, of.weights, of.ids, of.packed(pair)), of.twin())


def test_adds(pair: Team, dtype: torch.dtype) -> None:
    of = case(11, (6, 2, 300, 24), dtype)
    packed, wanted = of.packed(pair), of.twin()
    for out_dtype in {dtype, torch.float32}:
        before = torch.randn(11, 300).to(out_dtype)
        room = torch.full((11, 303), torch.nan, dtype=out_dtype)
        found = experts(pair, of.x, of.weights, of.ids, packed, room[:, :300].copy_(before))
        assert_near(found.to(dtype), wanted + before)
        assert room[:, 300:].isnan().all()


def test_a_row_depends_on_itself_alone(pair: Team, dtype: torch.dtype) -> None:
    of = case(260, (3, 2, 70, 40), dtype)
    packed = of.packed(pair, biased=True)
    together = experts(pair, of.x, of.weights, of.ids, packed)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 31), slice(100, 231)):
        assert torch.equal(experts(pair, of.x[rows], of.weights[rows], of.ids[rows], packed), together[rows])


def test_threads_do_not_matter(team: Team, dtype: torch.dtype) -> None:
    alone = Team(team.library, 1)
    for num_rows in (1, 40):
        of = case(num_rows, (7, 3, 66, 33), dtype)
        packed = of.packed(team)
        found = (experts(by, of.x, of.weights, of.ids, packed) for by in (alone, team))
        assert torch.equal(*found)
    alone.close()


def test_no_rows(pair: Team, dtype: torch.dtype) -> None:
    of = case(0, (3, 2, 40, 16), dtype)
    assert experts(pair, of.x, of.weights, of.ids, of.packed(pair)).shape == (0, 40)
