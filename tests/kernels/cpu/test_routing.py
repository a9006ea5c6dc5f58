import torch

from diptych.kernels.cpu.library import Team
from diptych.kernels.cpu.routing import route
from diptych.kernels.moe.moe_routing import Routing, moe_routing_twin

FAMILIES = {
    "mixtral": (8, Routing(2)),
    "qwen3": (128, Routing(8)),
    "not renormalised": (60, Routing(4, renormalise=False)),
    "one": (5, Routing(1)),
    "all": (3, Routing(3)),
    "deepseek 2": (160, Routing(6, renormalise=False, scale=16.0, num_groups=8, top_groups=3)),
    "deepseek 3": (256, Routing(8, sigmoid=True, scale=2.5, num_groups=8, top_groups=4, group_by_two=True)),
    "many small groups": (40, Routing(8, sigmoid=True, num_groups=20, top_groups=17, group_by_two=True)),
}


def assert_is_its_twin(team: Team, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> None:
    weights, experts = route(team, logits, routing, bias)
    their_weights, their_experts = moe_routing_twin(logits, routing, bias)
    assert torch.equal(experts, their_experts)
    torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=1e-7)


def test_is_its_twin(pair: Team) -> None:
    for num_experts, routing in FAMILIES.values():
        torch.manual_seed(num_experts)
        logits = torch.full((37, num_experts + 3), torch.nan)[:, :num_experts].copy_(torch.randn(37, num_experts) * 3)
        assert_is_its_twin(pair, logits, routing)
        assert_is_its_twin(pair, logits, routing, torch.randn(num_experts))


def test_of_equal_experts_the_lowest(pair: Team) -> None:
    torch.manual_seed(0)
    for num_experts, routing in FAMILIES.values():
        assert_is_its_twin(pair, torch.randint(-2, 3, (50, num_experts)).float(), routing)
        assert_is_its_twin(pair, torch.zeros(2, num_experts), routing)


def test_what_is_no_number_counts_as_the_lowest(pair: Team) -> None:
    torch.manual_seed(0)
    for num_experts, routing in FAMILIES.values():
        logits = torch.randn(9, num_experts)
        for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            logits[3 * row, 1] = logits[3 * row + 1, :2] = logits[3 * row + 2, :] = value
        assert_is_its_twin(pair, logits, routing)


def test_a_row_depends_on_itself_alone(team: Team) -> None:
    for num_experts, routing in FAMILIES.values():
        logits = torch.randn(20, num_experts)
        weights, _ = route(team, logits, routing)
        assert torch.equal(weights, torch.cat([route(team, logits[i : i + 1], routing)[0] for i in range(20)]))


def test_no_rows(pair: Team) -> None:
    weights, experts = route(pair, torch.empty(0, 8), Routing(2))
    assert weights.shape == experts.shape == (0, 2)
