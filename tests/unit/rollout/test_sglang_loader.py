"""What runs inside SGLang: tensors get where the model's own loader puts them, and come back as they are held."""

import pytest
import torch
from fused_model import PADDED_VOCAB, FusedModel

from miles_core.rollout.sglang.loader import exchange, header
from miles_core.weight_sync.handles import carrier
from miles_core.weight_sync.layout import Layout, forms_of, in_rows
from miles_core.weight_sync.packing import copy_all

H, F, V = 8, 12, 10
SHAPES = {
    "model.embed_tokens.weight": (V, H),
    "model.layers.0.self_attn.q_proj.weight": (16, H),
    "model.layers.0.self_attn.k_proj.weight": (8, H),
    "model.layers.0.self_attn.v_proj.weight": (8, H),
    "model.layers.0.self_attn.o_proj.weight": (H, 16),
    "model.layers.0.input_layernorm.weight": (H,),
    **{f"model.layers.0.mlp.experts.{e}.{p}_proj.weight": (F, H) for e in range(3) for p in ("gate", "up")},
    **{f"model.layers.0.mlp.experts.{e}.down_proj.weight": (H, F) for e in range(3)},
    "lm_head.weight": (V, H),
    "model.layers.1.enorm.weight": (H,),
}


def push(tensors: dict[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    layout = in_rows(forms_of(list(tensors.items())))
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    copy_all(layout.views(flat), list(tensors.values()))
    return layout, flat


def random(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def load(model: FusedModel, layout: Layout, flat: torch.Tensor) -> None:
    exchange(model, [(header("load", layout, first=True, last=True), carrier(flat))])


def read(model: FusedModel, layout: Layout) -> dict[str, torch.Tensor]:
    flat = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    exchange(model, [(header("read", layout, first=False, last=True), carrier(flat))])
    return dict(zip(SHAPES, layout.views(flat), strict=True))


def state(model: FusedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"threads": True}, {"derives": True}, {"mtp_from": 1}, {"rank": 1, "ranks": 2}]
)
def test_every_push_equals_the_models_own_loading(options: dict) -> None:
    model, own = FusedModel(SHAPES, **options), FusedModel(SHAPES, **options)
    buffer = None
    for seed in range(3):
        layout, flat = push(random(seed))
        if buffer is None:
            buffer = flat
        buffer.copy_(flat)  # the pusher's buffer stays, its bytes change
        load(model, layout, buffer)
        own.load_weights(random(seed).items())
        for name, held in state(own).items():
            assert torch.equal(held, state(model)[name]), (seed, name)
        if "derives" in options:
            assert torch.equal(model.derived, own.derived)
    assert model.loads == (3 if "derives" in options else 1)  # later pushes repeat the copies


def test_the_fused_model_is_what_it_says() -> None:
    tensors = random(0)
    model = FusedModel(SHAPES)
    model.load_weights(tensors.items())
    held = state(model)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(held["model/layers/0/self_attn/qkv_proj/weight"], torch.cat([tensors[n] for n in names]))
    experts = held["model/layers/0/mlp/experts/gate_up_proj/weight"]
    assert experts.shape == (3, 2 * F, H)
    assert torch.equal(experts[2, F:], tensors["model.layers.0.mlp.experts.2.up_proj.weight"])
    assert held["lm_head/weight"].shape == (V + PADDED_VOCAB, H) and not held["lm_head/weight"][V:].any()


@pytest.mark.parametrize("came_otherwise", [False, True])
def test_what_is_held_comes_back(came_otherwise: bool) -> None:
    """Also where the weights did not come by this loader, without a change to them."""
    model, tensors = FusedModel(SHAPES, mtp_from=1), random(0)
    layout, flat = push(tensors)
    if came_otherwise:
        model.load_weights(tensors.items())
    else:
        load(model, layout, flat)
    before = state(model)
    found = read(model, layout)
    for name, tensor in tensors.items():
        if name == "model.layers.1.enorm.weight":
            assert (found[name].view(torch.int32) == -1).all()  # not written
        else:
            assert torch.equal(found[name], tensor), name
    assert all(torch.equal(held, before[name]) for name, held in state(model).items())


def test_a_change_in_the_model_shows() -> None:
    model, tensors = FusedModel(SHAPES), random(0)
    layout, flat = push(tensors)
    load(model, layout, flat)
    dict(model.named_parameters())["model/layers/0/mlp/experts/gate_up_proj/weight"][1, F + 2, 3] += 1
    different = [name for name, tensor in read(model, layout).items() if not torch.equal(tensor, tensors[name])]
    assert different == ["model.layers.0.mlp.experts.1.up_proj.weight"]


def test_parameters_that_moved_are_found_again() -> None:
    model, tensors = FusedModel(SHAPES), random(0)
    layout, flat = push(tensors)
    load(model, layout, flat)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    load(model, layout, flat)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(model, layout).items())


def test_ranks_read_back_into_one_buffer() -> None:
    tensors = random(0)
    layout, flat = push(tensors)
    ranks = [FusedModel(SHAPES, rank=rank, ranks=2) for rank in range(2)]
    for model in ranks:
        load(model, layout, flat)
    together = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    for model in ranks:
        exchange(model, [(header("read", layout, first=False, last=True), carrier(together))])
    assert all(torch.equal(a, b) for a, b in zip(layout.views(together), tensors.values(), strict=True))


class Turned:
    """A format that rearranges weights after loading, as INT4 kernels want them, and can undo it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        self.calls.append("restore")
        layer.weight.resize_(4, 6)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.calls.append("process")
        turned = layer.weight.T.contiguous()
        layer.weight.resize_(6, 4).copy_(turned)


class Packed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.scheme = Turned()

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


def test_formats_are_unpacked_around_a_push() -> None:
    layer = Packed()
    layer.scheme.process_weights_after_loading(layer)
    for seed in range(2):
        tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        layout, flat = push({"weight": tensor})
        exchange(layer, [(header("load", layout, first=True, last=False), carrier(flat))])
        back = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
        exchange(layer, [(header("read", layout, first=False, last=True), carrier(back))])
        assert torch.equal(layout.views(back)[0], tensor)
        assert torch.equal(layer.weight, tensor.T)
    assert layer.scheme.calls == ["process"] + 2 * ["restore", "process"]


class Router(torch.nn.Module):
    """Widens its weight when it first runs and keeps the result, as SGLang's GLM-4.5 does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.float()
        return x @ self._weight_fp32.T

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


@pytest.mark.parametrize("way", ["load", "read", "refresh"])
def test_what_a_module_derived_follows_its_weight_in_place(way: str) -> None:
    """After a push; after one that is read back at its end; after one that came by broadcast."""
    router, x = Router(), torch.eye(6)
    for seed in range(3):
        tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
        layout, flat = push({"weight": tensor})
        if way == "refresh":
            router.load_weights([("weight", tensor)])
            nothing = torch.zeros(1, dtype=torch.uint8)
            exchange(router, [(header("refresh", Layout((), 0), first=False, last=True), carrier(nothing))])
        else:
            exchange(router, [(header("load", layout, first=True, last=way == "load"), carrier(flat))])
        if way == "read":
            exchange(router, [(header("read", layout, first=False, last=True), carrier(flat))])
        before = router._weight_fp32
        assert torch.equal(router(x), tensor.float().T)
        assert before is None or before.data_ptr() == router._weight_fp32.data_ptr()
