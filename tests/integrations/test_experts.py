"""Attention and routers in language models of Transformers, made small from their configurations."""

import pytest
import torch

import fastguard

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}),
        ("Qwen3Moe", {"num_experts": 4, "decoder_sparse_step": 1, "head_dim": 8}),
        ("Llama", {}),
    ],
)
def test_attention_and_routers_are_seen_in_each_layer(kind, settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3), model, activations=True)
    x = torch.randint(64, (2, 16))
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    choices = [one for one in optimizer.guard.last.activations if one.is_choice]
    names = [one.name for one in choices]
    has_experts = kind != "Llama"
    expected = []
    for layer in ("model.layers.0", "model.layers.1"):
        expected += [f"{layer}.self_attn[attention]"] + [f"{layer}.mlp.gate[router]"] * has_experts
    assert names == expected
    for one in choices:
        assert one.entropy is not None and 0.0 < one.entropy <= 1.0
        if one.load is not None:
            assert sum(one.load) == pytest.approx(2.0) and one.stats.total_elements == 32 * 4
    optimizer.guard.close()
