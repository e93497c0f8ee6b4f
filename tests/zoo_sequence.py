"""The part of the zoo with tokens: pooling, attention, language models; see tests.zoo."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import ANY, HIDDEN, MLP, OUT2, OUT3, SCORE, Net, case, linear, param, tokens, unit, x, xs


@case(x(2, 4, 5), HIDDEN, OUT2)
def mean_over_tokens():
    return Net(lambda m, x: m.fc2(F.relu(m.fc1(x)).mean(1)), fc1=linear(5, 7), fc2=linear(7, 3))


@case(x(4, 2, 5), HIDDEN, OUT2, batch_dim=1)
def tokens_first_last_token_read():
    return Net(lambda m, x: m.fc2(F.relu(m.fc1(x))[-1]), fc1=linear(5, 7), fc2=linear(7, 3))


@case(x(2, 4, 5), HIDDEN, OUT2)
def positional_parameter_added():
    def run(m, x):
        return m.fc2(F.relu(m.fc1(x) + m.position).sum(1))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 3), position=param(0.1 * torch.ones(1, 4, 7)))


@case(x(2, 4, 5), MLP, OUT3)
def class_token_prepended():
    """The token is a parameter in the same columns: no other unit, so fc1's columns are its own."""

    def run(m, x):
        h = F.relu(m.fc1(x))
        h = torch.cat([m.token.expand(h.shape[0], -1, -1), h], 1)
        return m.fc3(F.relu(m.fc2(h)).mean(1))

    layers = {"fc1": linear(5, 7), "fc2": linear(7, 9), "fc3": linear(9, 3)}
    return Net(run, token=param(torch.full((1, 1, 7), 0.3)), **layers)


@case(x(2, 4, 5), MLP, OUT3)
def time_folded_into_the_batch():
    def run(m, x):
        h = F.relu(m.fc2(F.relu(m.fc1(x.flatten(0, 1)))))
        return m.fc3(h.unflatten(0, (x.shape[0], x.shape[1])).amax(1))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 6, 5), {"fc1": unit(7, "fc1", "conv"), "conv": unit(4, "conv", "fc2")}, OUT2)
def transpose_and_reshape_between_layers():
    def run(m, x):
        h = F.relu(m.fc1(x)).transpose(1, 2)  # (B, units, time)
        h = F.relu(m.conv(h)).reshape(x.shape[0], 2, 2, 4)  # four channels in two by two
        return m.fc2(h.transpose(1, 2).flatten(1))

    return Net(run, fc1=linear(5, 7), conv=nn.Conv1d(7, 4, 3), fc2=linear(16, 3))


@case(x(2, 4, 5), {"fc1": unit(7, "fc1", "score head")}, {"score": ANY, "head": "output"})
def attention_pooling():
    """One score weighs all units of a token: skipped like the spatial gate."""

    def run(m, x):
        h = torch.tanh(m.fc1(x))
        return m.head((torch.softmax(m.score(h), 1) * h).sum(1))

    return Net(run, fc1=linear(5, 7), score=linear(7, 1), head=linear(7, 3))


# attention


def split_heads(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(2)


def transformer(attend: Callable[..., Tensor], **projections: nn.Module) -> Net:
    """A pre-norm block of width 8 between `embed` and `head`; `attend(net, normed)` is its attention."""

    def run(m, x):
        x = m.embed(x)
        x = x + attend(m, m.ln1(x))
        x = x + m.ff2(F.gelu(m.ff1(m.ln2(x))))
        return m.head(m.ln3(x).mean(1))

    parts = {"embed": linear(5, 8), "ff1": linear(8, 12), "ff2": linear(12, 8), "head": linear(8, 3)}
    norms = {f"ln{i}": nn.LayerNorm(8) for i in (1, 2, 3)}
    return Net(run, **norms, **projections, **parts)


FEED_FORWARD = {"ff1": unit(12, "ff1", "ff2")}
VALUE = {"v": unit(6, "v", "o"), **FEED_FORWARD}
STREAM = {"embed": unit(8, "embed o ff2", "q k v ff1 head", "ln1 ln2 ln3", exact=False)}
STREAM_SKIPPED = {"embed": "residual", "head": "output"}


@case(x(2, 4, 5), VALUE, {"q": SCORE, "k": SCORE, **STREAM_SKIPPED}, extra=STREAM)
def transformer_pre_norm():
    def attend(m, h):
        q, k, v = (split_heads(layer(h), 2) for layer in (m.q, m.k, m.v))
        return m.o(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    return transformer(attend, q=linear(8, 4), k=linear(8, 4), v=linear(8, 6), o=linear(6, 8))


@case(x(2, 4, 5), VALUE, {"q": ANY, "k": ANY, **STREAM_SKIPPED}, extra=STREAM)
def transformer_softmax_by_hand():
    def attend(m, h):
        q, k, v = (split_heads(layer(h), 2) for layer in (m.q, m.k, m.v))
        weights = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        hidden = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        weights = F.dropout(torch.softmax(weights.masked_fill(hidden, float("-inf")), -1), 0.1, m.training)
        return m.o(join_heads(weights @ v))

    return transformer(attend, o=linear(6, 8), v=linear(8, 6), k=linear(8, 4), q=linear(8, 4))


@case(
    x(2, 4, 5),
    {"qkv": unit(8, "qkv", "o"), **FEED_FORWARD},
    STREAM_SKIPPED,
    extra={"embed": unit(8, "embed o ff2", "qkv ff1 head", "ln1 ln2 ln3", exact=False)},
)
def transformer_fused_qkv():
    def attend(m, h):
        q, k, v = m.qkv(h).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return m.o(join_heads(F.scaled_dot_product_attention(q, k, v)))

    return transformer(attend, qkv=linear(8, 24), o=linear(8, 8))


@case(x(2, 4, 5), VALUE, {"q": SCORE, "k": SCORE, **STREAM_SKIPPED}, extra=STREAM)
def transformer_grouped_query():
    """Two value heads serve four query heads: each value unit has two columns in o."""

    def attend(m, h):
        q, k, v = split_heads(m.q(h), 4), split_heads(m.k(h), 2), split_heads(m.v(h), 2)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        return m.o(join_heads(F.scaled_dot_product_attention(q, k, v)))

    return transformer(attend, q=linear(8, 8), k=linear(8, 4), v=linear(8, 6), o=linear(12, 8))


class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = linear(5, 4), linear(5, 4), linear(5, 6)
        self.output = linear(6, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(tokens), 2) for layer in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.output(join_heads(a)).mean(1)


@case(
    lambda: {"tokens": torch.randn(2, 4, 5), "mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()},
    {"value": unit(6, "value", "output")},
    {"query": SCORE, "key": SCORE, "output": "output"},
)
def attention_with_a_mask_as_keyword():
    return MaskedAttention()


class HandMadeRMSNorm(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.weight = param(torch.ones(n))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """Grouped-query attention with rotary positions and SwiGLU, all without biases, norms by hand."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.n1, self.n2, self.n3 = (HandMadeRMSNorm(8) for _ in range(3))
        self.q, self.k, self.v = (linear(8, n, bias=False) for n in (16, 8, 8))
        self.o = linear(16, 8, bias=False)
        self.gate, self.up, self.down = (linear(*n, bias=False) for n in ((8, 12), (8, 12), (12, 8)))
        self.head = linear(8, 11, bias=False)
        angle = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1])).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotate(self, t):
        left, right = t.chunk(2, dim=-1)
        return t * self.cos + torch.cat([-right, left], -1) * self.sin

    def forward(self, ids):
        x = self.embed(ids)
        h = self.n1(x)
        q, k, v = split_heads(self.q(h), 4), split_heads(self.k(h), 2), split_heads(self.v(h), 2)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        a = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        x = x + self.o(join_heads(a))
        h = self.n2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.n3(x))


@case(
    tokens(11, 2, 5),
    {"v": unit(8, "v", "o", exact=False), "gate": unit(12, "gate up", "down", exact=False)},
    {"q": ANY, "k": ANY, "embed": ANY, "head": "output"},
    extra={"embed": unit(8, "embed o down", "q k v gate up head", "n1 n2 n3", exact=False)},
)
def llama():
    """The norms are known by what they do, and the embedding writes the stream like a linear layer."""
    return Llama()


@case(
    tokens(11, 2, 4),
    {"c_attn": unit(8, "c_attn", "c_proj"), "fc": unit(12, "fc", "proj")},
    {"wte": "embedding|residual|added", "head": "output"},
    extra={"wte": unit(8, "wte wpe c_proj proj", "c_attn fc head", "ln1 ln2", exact=False)},
)
def gpt():
    """Embeddings are reset as writers of the stream, never alone."""

    def run(m, ids):
        x = m.wte(ids) + m.wpe(torch.arange(ids.shape[1]))
        q, k, v = (split_heads(t, 2) for t in m.c_attn(m.ln1(x)).split(8, dim=-1))
        x = x + m.drop(m.c_proj(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True))))
        x = x + m.drop(m.proj(F.gelu(m.fc(m.ln2(x)))))
        return m.head(x)

    parts = {
        "wte": nn.Embedding(11, 8),
        "wpe": nn.Embedding(4, 8),
        "c_attn": linear(8, 24),
        "c_proj": linear(8, 8),
    }
    parts |= {"ln1": nn.LayerNorm(8), "ln2": nn.LayerNorm(8), "fc": linear(8, 12), "proj": linear(12, 8)}
    return Net(run, **parts, drop=nn.Dropout(0.1), head=linear(8, 11, bias=False))


@case(
    x(2, 3, 4, 6),
    {"qkv": unit(8, "qkv", "proj"), "fc1": unit(12, "fc1", "fc2")},
    {"patch": "residual", "head": "output"},
    extra={"patch": unit(8, "patch proj fc2", "qkv fc1 head", "ln1 ln2", exact=False)},
)
def vision_transformer():
    def run(m, x):
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.cls.expand(x.shape[0], -1, -1), x], 1) + m.position
        q, k, v = (split_heads(t, 2) for t in m.qkv(m.ln1(x)).chunk(3, dim=-1))
        x = x + m.proj(join_heads(F.scaled_dot_product_attention(q, k, v)))
        x = x + m.fc2(F.gelu(m.fc1(m.ln2(x))))
        return m.head(x[:, 0])

    parts = {"patch": nn.Conv2d(3, 8, 2, stride=2), "qkv": linear(8, 24), "proj": linear(8, 8)}
    parts |= {"ln1": nn.LayerNorm(8), "ln2": nn.LayerNorm(8), "fc1": linear(8, 12), "fc2": linear(12, 8)}
    parts |= {"cls": param(torch.zeros(1, 1, 8)), "position": param(0.1 * torch.ones(1, 7, 8))}
    return Net(run, **parts, head=linear(8, 3))


ATTENTION = {
    "attn": unit(8, "attn", "attn.out_proj"),
    "attn.out_proj": unit(8, "attn.out_proj", "head"),
}


@case(x(2, 4, 8), ATTENTION, {"head": "output"})
def multihead_attention_batch_first():
    attn = nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(lambda m, x: m.head(m.attn(x, x, x)[0].mean(1)), attn=attn, head=linear(8, 3))


@case(x(4, 2, 8), ATTENTION, {"head": "output"}, batch_dim=1)
def multihead_attention_tokens_first():
    def run(m, x):
        return m.head(m.attn(x, x, x, need_weights=False)[0].mean(0))

    return Net(run, attn=nn.MultiheadAttention(8, 4, dropout=0.1), head=linear(8, 3))


@case(x(2, 4, 5), {"fc": unit(8, "fc", "attn"), **ATTENTION}, {"head": "output"})
def linear_into_multihead_attention():
    """The packed input projection reads fc's units in all its rows."""

    def run(m, x):
        h = F.relu(m.fc(x))
        return m.head(m.attn(h, h, h, need_weights=False)[0].mean(1))

    return Net(run, attn=nn.MultiheadAttention(8, 2, batch_first=True), fc=linear(5, 8), head=linear(8, 3))


@case(xs((2, 3, 8), (2, 4, 8)), ATTENTION, {"head": "output"})
def cross_attention_packed():
    def run(m, x, memory):
        return m.head(m.attn(x, memory, memory)[0].mean(1))

    return Net(run, attn=nn.MultiheadAttention(8, 2, batch_first=True), head=linear(8, 3))


@case(
    xs((2, 3, 8), (2, 4, 5), (2, 4, 6)),
    {"attn": unit(8, "attn", "attn.out_proj"), "attn.out_proj": unit(8, "attn.out_proj", "head")},
    {"head": "output"},
)
def cross_attention_with_kdim_and_vdim():
    """Three separate projection weights; the group is all of v_proj_weight, hence no brackets."""

    def run(m, x, key, value):
        return m.head(m.attn(x, key, value, need_weights=False)[0].mean(1))

    return Net(run, attn=nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True), head=linear(8, 3))


ENCODER = {
    "layer.self_attn": unit(8, "layer.self_attn", "layer.self_attn.out_proj"),
    "layer.linear1": unit(12, "layer.linear1", "layer.linear2"),
}
ENCODER_STREAM = {
    "embed": unit(
        8,
        "embed layer.self_attn.out_proj layer.linear2",
        "layer.self_attn layer.linear1 head",
        "layer.norm1 layer.norm2",
        exact=False,
    )
}


def encoder(layer: nn.Module) -> Net:
    return Net(lambda m, x: m.head(m.layer(m.embed(x)).mean(1)), embed=linear(5, 8), layer=layer, head=linear(8, 3))


@case(x(2, 4, 5), ENCODER, STREAM_SKIPPED, extra=ENCODER_STREAM)
def encoder_layer_norm_last():
    return encoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True))


@case(x(2, 4, 5), ENCODER, STREAM_SKIPPED, extra=ENCODER_STREAM)
def encoder_layer_norm_first():
    return encoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True))


@case(x(4, 2, 8), ENCODER, {"layer.self_attn.out_proj": "added", "head": "output"}, extra={}, batch_dim=1)
def encoder_layer_on_raw_input():
    return Net(lambda m, x: m.head(m.layer(x)[0]), layer=nn.TransformerEncoderLayer(8, 2, 12), head=linear(8, 3))


@case(
    xs((2, 3, 5), (2, 4, 8)),
    {
        **ENCODER,
        "layer.multihead_attn": unit(8, "layer.multihead_attn", "layer.multihead_attn.out_proj"),
    },
    STREAM_SKIPPED,
)
def decoder_layer():
    def run(m, x, memory):
        return m.head(m.layer(m.embed(x), memory).mean(1))

    layer = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
    return Net(run, embed=linear(5, 8), layer=layer, head=linear(8, 3))


@case(
    x(2, 4, 5),
    {"token1": unit(7, "token1", "token2"), "channel1": unit(10, "channel1", "channel2")},
    {"embed": ANY, "head": "output"},
    extra={},
)
def mixer_block():
    """Each column of token1 is a token and holds all channels: none can be reset, not even in a group."""

    def run(m, x):
        x = m.embed(x)
        x = x + m.token2(F.gelu(m.token1(m.ln1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + m.channel2(F.gelu(m.channel1(m.ln2(x))))
        return m.head(x.mean(1))

    parts = {"embed": linear(5, 6), "token1": linear(4, 7), "token2": linear(7, 4), "channel1": linear(6, 10)}
    parts |= {"channel2": linear(10, 6), "ln1": nn.LayerNorm(6), "ln2": nn.LayerNorm(6)}
    return Net(run, **parts, head=linear(6, 3))
